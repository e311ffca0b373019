//! One connection through the proxy.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::weather::{Direction, End, Strike, Weather};
use super::{Shared, What};

/// Chunks under way in one direction before the sender has to wait.
const UNDER_WAY: usize = 64;

/// What a connection is subject to.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Conditions {
    weather: [Weather; 2],
    black_hole: bool,
    end: Option<End>,
    shut: [bool; 2],
    limit: [Option<Limit>; 2],
}

#[derive(Clone, Copy, Debug)]
struct Limit {
    /// Tells a new limit from the one before.
    serial: u64,
    bytes: usize,
    end: End,
}

impl Conditions {
    pub(super) fn new(weather: [Weather; 2]) -> Self {
        Self { weather, ..Self::default() }
    }

    pub(super) fn set(&mut self, direction: Direction, weather: Weather) {
        self.weather[direction as usize] = weather;
    }

    pub(super) fn strike(&mut self, strike: Strike, serial: u64) {
        match strike {
            Strike::End(End::BlackHole) => self.black_hole = true,
            Strike::End(end) => self.end = Some(end),
            Strike::HalfClose(direction) => self.shut[direction as usize] = true,
            Strike::After { direction, bytes, end } => {
                self.limit[direction as usize] = Some(Limit { serial, bytes, end });
            }
        }
    }

    fn is_silent(&self, direction: Direction) -> bool {
        self.black_hole || self.weather[direction as usize].silent
    }
}

/// Serves one connection until either side, a strike or the proxy's end closes it.
pub(super) async fn forward(
    mut client: TcpStream,
    upstream: SocketAddr,
    number: u64,
    shared: Arc<Shared>,
    conditions: watch::Receiver<Conditions>,
    mut alive: watch::Receiver<()>,
) {
    let mut server = None;
    let ended = async {
        calm(&mut conditions.clone(), Direction::Requests).await;
        let Ok(stream) = TcpStream::connect(upstream).await else {
            return End::Close; // closes the client's connection, as a refusal would
        };
        // a request is often several small writes; they must not wait for one another
        drop(client.set_nodelay(true));
        drop(stream.set_nodelay(true));
        let (client_reads, client_writes) = client.split();
        let (server_reads, server_writes) = server.insert(stream).split();
        let way = |direction| Way {
            direction,
            number,
            shared: &shared,
            conditions: conditions.clone(),
            limit: (0, 0),
        };
        tokio::select! {
            end = pump(client_reads, server_writes, way(Direction::Requests)) => end,
            end = pump(server_reads, client_writes, way(Direction::Answers)) => end,
        }
    };
    let end = tokio::select! {
        biased;
        end = struck(conditions.clone()) => end,
        () = async { while alive.changed().await.is_ok() {} } => End::Close,
        end = ended => end,
    };
    if end == End::Reset {
        // instead of an orderly end
        drop(client.set_zero_linger());
        drop(server.map(|server| server.set_zero_linger()));
    }
    shared.closed(number, end);
}

/// Ends when the connection is struck by an end.
async fn struck(mut conditions: watch::Receiver<Conditions>) -> End {
    match conditions.wait_for(|now| now.end.is_some()).await {
        Ok(now) => now.end.unwrap_or(End::Close),
        Err(_) => End::Close, // the proxy is gone
    }
}

/// One direction of a connection.
struct Way<'a> {
    direction: Direction,
    number: u64,
    shared: &'a Shared,
    conditions: watch::Receiver<Conditions>,
    /// The serial of the limit that is being counted, and what is left of it.
    limit: (u64, usize),
}

/// Bytes with the time at which they arrive; none for the end of the stream.
type Chunk = (Instant, Vec<u8>);

/// Copies bytes as the conditions are, and says how the connection ends.
async fn pump(from: ReadHalf<'_>, to: WriteHalf<'_>, way: Way<'_>) -> End {
    let (sender, receiver) = mpsc::channel(UNDER_WAY);
    let conditions = way.conditions.clone();
    let salt = way.number.wrapping_mul(2).wrapping_add(way.direction as u64);
    let rng = StdRng::seed_from_u64(way.shared.seed.wrapping_add(salt));
    tokio::select! {
        never = take(from, sender, way.direction, conditions, rng) => match never {},
        end = give(to, receiver, way) => end,
    }
}

async fn take(
    mut from: ReadHalf<'_>,
    chunks: mpsc::Sender<Chunk>,
    direction: Direction,
    conditions: watch::Receiver<Conditions>,
    mut rng: StdRng,
) -> Infallible {
    let mut buffer = vec![0; 16 * 1024];
    let mut due = Instant::now();
    loop {
        let count = from.read(&mut buffer).await.unwrap_or(0);
        let Weather { delay, jitter, .. } = conditions.borrow().weather[direction as usize];
        let late = delay + jitter.mul_f64(rng.random::<f64>());
        due = due.max(Instant::now() + late);
        drop(chunks.send((due, buffer[..count].to_vec())).await);
        if count == 0 {
            std::future::pending::<()>().await;
        }
    }
}

async fn give(mut to: WriteHalf<'_>, mut chunks: mpsc::Receiver<Chunk>, mut way: Way<'_>) -> End {
    let (mut waiting, mut is_shut) = (VecDeque::new(), false);
    loop {
        let shut = way.conditions.borrow_and_update().shut[way.direction as usize];
        if shut && !is_shut {
            is_shut = true;
            calm(&mut way.conditions, way.direction).await;
            if to.shutdown().await.is_err() {
                return End::Close;
            }
        }
        tokio::select! {
            biased;
            changed = way.conditions.changed() => match changed {
                Ok(()) => continue,
                Err(_) => return End::Close, // the proxy is gone
            },
            chunk = chunks.recv() => waiting.extend(chunk),
        }
        while let Some((due, chunk)) = waiting.pop_front() {
            tokio::time::sleep_until(due).await;
            calm(&mut way.conditions, way.direction).await;
            if chunk.is_empty() {
                return End::Close;
            }
            let chunk = match way.direction {
                Direction::Requests => {
                    way.shared.strike_who_asks(way.number);
                    chunk
                }
                Direction::Answers => way.shared.answers(way.number, chunk),
            };
            let shut = way.conditions.borrow().shut[way.direction as usize];
            if !(is_shut || shut)
                && let Err(end) = way.write(&mut to, &chunk).await
            {
                if end != End::BlackHole {
                    return end;
                }
                way.shared.strike_one(way.number, Strike::End(End::BlackHole));
                std::future::pending::<()>().await;
            }
        }
    }
}

impl Way<'_> {
    /// Writes a chunk, a piece at a time where the line is slow; an error is the connection's end.
    async fn write(&mut self, to: &mut WriteHalf<'_>, mut chunk: &[u8]) -> Result<(), End> {
        while !chunk.is_empty() {
            calm(&mut self.conditions, self.direction).await;
            let (limit, trickle) = {
                let now = self.conditions.borrow();
                (now.limit[self.direction as usize], now.weather[self.direction as usize].trickle)
            };
            let mut count = chunk.len();
            if let Some(trickle) = trickle {
                count = count.min(trickle.bytes);
            }
            if let Some(Limit { serial, bytes, end }) = limit {
                if self.limit.0 != serial {
                    self.limit = (serial, bytes);
                }
                count = count.min(self.limit.1);
                if count == 0 {
                    return Err(end);
                }
                self.limit.1 -= count;
            }
            let (piece, rest) = chunk.split_at(count);
            to.write_all(piece).await.map_err(|_| End::Close)?;
            chunk = rest;
            if let Some(trickle) = trickle.filter(|_| !rest.is_empty()) {
                self.pause(trickle.every).await;
            }
        }
        Ok(())
    }

    /// A pause between two pieces; cut short by a change of the weather.
    async fn pause(&mut self, time: Duration) {
        let mut conditions = self.conditions.clone();
        drop(tokio::time::timeout(time, conditions.changed()).await);
    }
}

/// Waits until bytes of this direction arrive.
async fn calm(conditions: &mut watch::Receiver<Conditions>, direction: Direction) {
    // an error means that the proxy is gone, which ends the connection by itself
    drop(conditions.wait_for(|now| !now.is_silent(direction)).await);
}

impl Shared {
    /// The armed strike, if there is one, hits the connection that asks now.
    fn strike_who_asks(&self, number: u64) {
        let strike = self.state().next.take();
        if let Some(strike) = strike {
            self.strike_one(number, strike);
        }
    }

    fn closed(&self, number: u64, end: End) {
        self.state().connections.remove(&number);
        self.note(Some(number), What::Closed(end));
    }
}
