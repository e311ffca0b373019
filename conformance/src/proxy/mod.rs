//! [`Proxy`]: a small TCP proxy that makes the faults of a network on demand.

mod connection;
#[cfg(test)]
mod tests;
mod weather;

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::watch;

use self::connection::{Conditions, forward};
pub use self::weather::{Direction, End, Strike, Trickle, Weather};
use crate::history::monotonic;

/// The newest entries of the record that are kept.
const RECORDED: usize = 10_000;

/// Forwards connections on a loopback port to a server, until it is told to make a fault.
///
/// A harness puts each handle behind a proxy of its own, so that a fault concerns that handle
/// only. Faults are of two sorts: [`Weather`] lasts, in one direction or both, on one connection or
/// all; a [`Strike`] happens once. What was done is [recorded](Self::record). Dropping the proxy
/// closes its port and its connections.
///
/// ```
/// # use leasehold_conformance::Proxy;
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> std::io::Result<()> {
/// let server = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
/// let proxy = Proxy::start(server.local_addr()?).await?;
/// let _client = tokio::net::TcpStream::connect(proxy.addr()).await?;
/// server.accept().await?; // it came through
/// proxy.silence(); // from here on nothing does
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Proxy {
    addr: SocketAddr,
    shared: Arc<Shared>,
    /// Its end tells the tasks.
    _alive: watch::Sender<()>,
}

/// What the proxy and its connections share.
#[derive(Debug)]
struct Shared {
    seed: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// That of new connections.
    weather: [Weather; 2],
    /// Hits the connection on which the next request arrives.
    next: Option<Strike>,
    connections: BTreeMap<u64, watch::Sender<Conditions>>,
    opened: u64,
    strikes: u64,
    record: VecDeque<Record>,
}

/// Something that the proxy did, or that happened to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Record {
    /// When, by [`monotonic`].
    pub at: Duration,
    /// On which connection; none: on all, or on the next.
    pub connection: Option<u64>,
    /// What.
    pub what: What,
}

/// What a [`Record`] tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum What {
    /// A client connected.
    Opened,
    /// A connection ended, by a strike or by one of its sides.
    Closed(End),
    /// The weather of a direction changed.
    Weather(Direction, Weather),
    /// A strike hit.
    Struck(Strike),
    /// A strike waits for the next request.
    Armed(Strike),
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.6}", self.at.as_secs_f64())?;
        if let Some(number) = self.connection {
            write!(f, " connection {number}")?;
        }
        match self.what {
            What::Opened => f.write_str(" opened"),
            What::Closed(end) => write!(f, " ended: {}", Strike::End(end)),
            What::Weather(Direction::Requests, weather) => write!(f, " requests: {weather}"),
            What::Weather(Direction::Answers, weather) => write!(f, " answers: {weather}"),
            What::Struck(strike) => write!(f, " {strike}"),
            What::Armed(strike) => write!(f, " at the next request: {strike}"),
        }
    }
}

impl Proxy {
    /// Opens a free loopback port that leads to `upstream`.
    ///
    /// # Errors
    /// If no port could be opened.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn start(upstream: SocketAddr) -> std::io::Result<Self> {
        Self::start_seeded(upstream, 0).await
    }

    /// As [`start`](Self::start); `seed` decides the jitter of each connection.
    ///
    /// # Errors
    /// If no port could be opened.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn start_seeded(upstream: SocketAddr, seed: u64) -> std::io::Result<Self> {
        Self::start_on(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), upstream, seed).await
    }

    /// As [`start_seeded`](Self::start_seeded), listening on this address: that of one end of a
    /// network, say.
    ///
    /// # Errors
    /// If the port could not be opened.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn start_on(
        listen: SocketAddr,
        upstream: SocketAddr,
        seed: u64,
    ) -> std::io::Result<Self> {
        let listener = TcpListener::bind(listen).await?;
        let addr = listener.local_addr()?;
        let shared = Arc::new(Shared { seed, state: Mutex::default() });
        let alive = watch::Sender::new(());
        tokio::spawn(accept(listener, upstream, shared.clone(), alive.subscribe()));
        Ok(Self { addr, shared, _alive: alive })
    }

    /// Where to connect instead of the server.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The open connections, in the order in which they came.
    pub fn connections(&self) -> Vec<u64> {
        self.shared.state().connections.keys().copied().collect()
    }

    /// What was done and what happened, the newest 10,000 entries in their order.
    pub fn record(&self) -> Vec<Record> {
        self.shared.state().record.iter().copied().collect()
    }

    /// Changes the weather of one direction of all connections, those to come included.
    pub fn set(&self, direction: Direction, weather: Weather) {
        let mut state = self.shared.state();
        state.weather[direction as usize] = weather;
        for connection in state.connections.values() {
            connection.send_modify(|now| now.set(direction, weather));
        }
        drop(state);
        self.shared.note(None, What::Weather(direction, weather));
    }

    /// Changes the weather of one direction of one connection. Nothing happens if it has ended.
    pub fn set_on(&self, connection: u64, direction: Direction, weather: Weather) {
        if let Some(connection) = self.shared.state().connections.get(&connection) {
            connection.send_modify(|now| now.set(direction, weather));
        }
        self.shared.note(Some(connection), What::Weather(direction, weather));
    }

    /// Hits all open connections; new ones are welcome.
    pub fn strike(&self, strike: Strike) {
        let mut state = self.shared.state();
        state.strikes += 1;
        let serial = state.strikes;
        for connection in state.connections.values() {
            connection.send_modify(|now| now.strike(strike, serial));
        }
        drop(state);
        self.shared.note(None, What::Struck(strike));
    }

    /// Hits one connection. Nothing happens if it has ended.
    pub fn strike_on(&self, connection: u64, strike: Strike) {
        self.shared.strike_one(connection, strike);
    }

    /// Hits the connection on which the next request arrives, when it arrives.
    pub fn strike_next(&self, strike: Strike) {
        self.shared.state().next = Some(strike);
        self.shared.note(None, What::Armed(strike));
    }

    /// Takes back what [`strike_next`](Self::strike_next) armed, if nobody has asked since.
    pub fn disarm(&self) {
        self.shared.state().next = None;
    }

    /// Lets the network go silent: connections stay open, new ones are accepted, and nothing is
    /// forwarded in either direction, also no end of a connection, until [`heal`](Self::heal).
    pub fn silence(&self) {
        for direction in Direction::BOTH {
            self.set(direction, Weather::silent());
        }
    }

    /// Clears the weather. What was sent in a silence arrives now, late.
    pub fn heal(&self) {
        for direction in Direction::BOTH {
            self.set(direction, Weather::clear());
        }
    }

    /// Closes all connections; new ones are welcome.
    pub fn cut(&self) {
        self.strike(Strike::End(End::Close));
    }

    /// Forwards the next bytes of a client; when the server's answer to them arrives, closes that
    /// connection instead of forwarding it.
    pub fn lose_next_answer(&self) {
        let (direction, bytes, end) = (Direction::Answers, 0, End::Close);
        self.strike_next(Strike::After { direction, bytes, end });
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, connection: Option<u64>, what: What) {
        let mut state = self.state();
        if state.record.len() == RECORDED {
            state.record.pop_front();
        }
        state.record.push_back(Record { at: monotonic(), connection, what });
    }

    fn strike_one(&self, number: u64, strike: Strike) {
        let mut state = self.state();
        state.strikes += 1;
        let serial = state.strikes;
        if let Some(connection) = state.connections.get(&number) {
            connection.send_modify(|now| now.strike(strike, serial));
        }
        drop(state);
        self.note(Some(number), What::Struck(strike));
    }

    /// Takes a new connection in.
    fn opened(&self) -> (u64, watch::Receiver<Conditions>) {
        let mut state = self.state();
        state.opened += 1;
        let number = state.opened;
        let (conditions, receiver) = watch::channel(Conditions::new(state.weather));
        state.connections.insert(number, conditions);
        drop(state);
        self.note(Some(number), What::Opened);
        (number, receiver)
    }
}

async fn accept(
    listener: TcpListener,
    upstream: SocketAddr,
    shared: Arc<Shared>,
    mut alive: watch::Receiver<()>,
) {
    loop {
        let client = tokio::select! {
            client = listener.accept() => client,
            () = async { while alive.changed().await.is_ok() {} } => return,
        };
        match client {
            Ok((client, _)) => {
                let (number, conditions) = shared.opened();
                let (shared, alive) = (shared.clone(), alive.clone());
                tokio::spawn(forward(client, upstream, number, shared, conditions, alive));
            }
            // a client that went away before it was accepted, or no descriptors left for now
            Err(error) => {
                tracing::debug!(%error, "no connection accepted");
                tokio::task::yield_now().await;
            }
        }
    }
}
