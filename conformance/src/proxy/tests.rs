//! The faults of the proxy, on a server that answers each message with itself.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use super::{Direction, End, Proxy, Strike, Weather, What};

const LONG: Duration = Duration::from_secs(10);
const SHORT: Duration = Duration::from_millis(100);

/// A server that answers each message with itself, and counts what it got.
async fn echo() -> (SocketAddr, watch::Receiver<usize>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let addr = listener.local_addr().unwrap();
    let (got, counted) = watch::channel(0);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let got = got.clone();
            tokio::spawn(async move {
                let mut buffer = [0; 64];
                while let Ok(count @ 1..) = stream.read(&mut buffer).await {
                    got.send_modify(|got| *got += count);
                    if stream.write_all(&buffer[..count]).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    (addr, counted)
}

async fn ask(stream: &mut TcpStream) -> std::io::Result<()> {
    stream.write_all(b"ping").await?;
    let mut answer = [0; 4];
    stream.read_exact(&mut answer).await?;
    assert_eq!(&answer, b"ping");
    Ok(())
}

async fn set_up() -> (Proxy, TcpStream, watch::Receiver<usize>) {
    let (server, got) = echo().await;
    let proxy = Proxy::start(server).await.unwrap();
    let mut client = TcpStream::connect(proxy.addr()).await.unwrap();
    timeout(LONG, ask(&mut client)).await.unwrap().unwrap();
    (proxy, client, got)
}

#[tokio::test]
async fn silence_keeps_connections_and_forwards_late() {
    let (proxy, mut client, mut got) = set_up().await;
    proxy.silence();
    let mut fresh = TcpStream::connect(proxy.addr()).await.unwrap();
    client.write_all(b"late").await.unwrap();
    fresh.write_all(b"new!").await.unwrap();
    let mut answer = [0; 4];
    assert!(timeout(SHORT, client.read(&mut answer)).await.is_err(), "an answer came");
    assert_eq!(*got.borrow_and_update(), 4, "a request came through");
    proxy.heal();
    timeout(LONG, client.read_exact(&mut answer)).await.unwrap().unwrap();
    assert_eq!(&answer, b"late");
    timeout(LONG, fresh.read_exact(&mut answer)).await.unwrap().unwrap();
    assert_eq!(&answer, b"new!");
}

#[tokio::test]
async fn a_cut_closes_what_is_open_and_lets_new_ones_in() {
    let (proxy, mut client, _got) = set_up().await;
    proxy.cut();
    let answer = timeout(LONG, ask(&mut client)).await.unwrap();
    assert!(answer.is_err(), "the connection survived a cut");
    let mut client = TcpStream::connect(proxy.addr()).await.unwrap();
    timeout(LONG, ask(&mut client)).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_cut_works_in_silence() {
    let (proxy, mut client, _got) = set_up().await;
    proxy.silence();
    proxy.cut();
    let closed = timeout(LONG, client.read(&mut [0; 4])).await.unwrap();
    assert!(matches!(closed, Ok(0) | Err(_)), "the connection survived: {closed:?}");
}

#[tokio::test]
async fn a_lost_answer_is_to_a_request_that_arrived() {
    let (proxy, mut client, got) = set_up().await;
    proxy.lose_next_answer();
    assert!(timeout(LONG, ask(&mut client)).await.unwrap().is_err());
    assert_eq!(*got.borrow(), 8, "the request did not arrive");
    let mut client = TcpStream::connect(proxy.addr()).await.unwrap();
    timeout(LONG, ask(&mut client)).await.unwrap().unwrap();
}

#[tokio::test]
async fn dropping_it_closes_everything() {
    let (proxy, mut client, _got) = set_up().await;
    let addr = proxy.addr();
    drop(proxy);
    let closed = timeout(LONG, client.read(&mut [0; 4])).await.unwrap();
    assert!(matches!(closed, Ok(0) | Err(_)), "the connection survived: {closed:?}");
    let refused = async {
        while TcpStream::connect(addr).await.is_ok() {
            tokio::task::yield_now().await;
        }
    };
    timeout(LONG, refused).await.expect("the port stays open");
}

/// Reads until the end of the stream or an error, and gives what came.
async fn drain(client: &mut TcpStream) -> (Vec<u8>, std::io::Result<()>) {
    let mut all = Vec::new();
    let mut buffer = [0; 64];
    let read = async {
        loop {
            match client.read(&mut buffer).await {
                Ok(0) => return Ok(()),
                Ok(count) => all.extend_from_slice(&buffer[..count]),
                Err(error) => return Err(error),
            }
        }
    };
    let end = timeout(LONG, read).await.expect("the connection stays open");
    (all, end)
}

#[tokio::test]
async fn delay_and_jitter_concern_one_direction_and_keep_the_order() {
    let (proxy, mut client, mut got) = set_up().await;
    let (delay, jitter) = (Duration::from_millis(100), Duration::from_millis(100));
    proxy.set(Direction::Answers, Weather::clear().delay(delay).jitter(jitter));
    let start = Instant::now();
    for byte in 0..20 {
        client.write_all(&[byte]).await.unwrap();
    }
    let arrived = timeout(LONG, got.wait_for(|got| *got == 24)).await.map(|got| got.is_ok());
    assert!(arrived.unwrap(), "the requests were held back");
    let mut answer = [0; 20];
    timeout(LONG, client.read_exact(&mut answer)).await.unwrap().unwrap();
    assert!(start.elapsed() >= delay, "an answer came too soon");
    assert_eq!(answer.to_vec(), (0..20).collect::<Vec<u8>>());
}

#[tokio::test]
async fn one_direction_can_be_silent() {
    let (proxy, mut client, mut got) = set_up().await;
    proxy.set(Direction::Answers, Weather::silent());
    client.write_all(b"1234").await.unwrap();
    assert!(timeout(LONG, got.wait_for(|got| *got == 8)).await.unwrap().is_ok());
    let mut answer = [0; 4];
    assert!(timeout(SHORT, client.read(&mut answer)).await.is_err(), "an answer came");
    proxy.heal();
    timeout(LONG, client.read_exact(&mut answer)).await.unwrap().unwrap();
}

#[tokio::test]
async fn one_connection_can_be_struck_and_the_others_go_on() {
    let (proxy, mut struck, _got) = set_up().await;
    let mut other = TcpStream::connect(proxy.addr()).await.unwrap();
    timeout(LONG, ask(&mut other)).await.unwrap().unwrap();
    let connections = proxy.connections();
    assert_eq!(connections.len(), 2);
    proxy.set_on(connections[1], Direction::Requests, Weather::clear());
    proxy.strike_on(connections[0], Strike::End(End::Close));
    let (_, end) = drain(&mut struck).await;
    assert!(end.is_ok(), "a close is no reset: {end:?}");
    timeout(LONG, ask(&mut other)).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_reset_is_no_orderly_end() {
    let (proxy, mut client, _got) = set_up().await;
    proxy.strike(Strike::End(End::Reset));
    let (_, end) = drain(&mut client).await;
    let kind = end.expect_err("the stream ended in order").kind();
    assert_eq!(kind, std::io::ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn a_black_hole_outlasts_the_weather_and_swallows_that_connection_only() {
    let (proxy, mut client, mut got) = set_up().await;
    proxy.strike(Strike::End(End::BlackHole));
    proxy.heal();
    client.write_all(b"lost").await.unwrap();
    assert!(timeout(SHORT, client.read(&mut [0; 4])).await.is_err(), "an answer came");
    assert_eq!(*got.borrow_and_update(), 4, "a request came through");
    let mut fresh = TcpStream::connect(proxy.addr()).await.unwrap();
    timeout(LONG, ask(&mut fresh)).await.unwrap().unwrap();
    proxy.cut();
    let _ended = drain(&mut client).await;
}

#[tokio::test]
async fn a_half_close_ends_one_direction() {
    // the echo server answers the end of the requests with an end of its own
    let (proxy, mut client, _got) = set_up().await;
    proxy.strike(Strike::HalfClose(Direction::Requests));
    let (answers, end) = drain(&mut client).await;
    assert!(answers.is_empty() && end.is_ok(), "{answers:?} {end:?}");

    // and knows nothing of an end of its answers
    let (proxy, mut client, mut got) = set_up().await;
    proxy.strike(Strike::HalfClose(Direction::Answers));
    let (answers, end) = drain(&mut client).await;
    assert!(answers.is_empty() && end.is_ok(), "{answers:?} {end:?}");
    client.write_all(b"more").await.unwrap();
    assert!(timeout(LONG, got.wait_for(|got| *got == 8)).await.unwrap().is_ok());
}

#[tokio::test]
async fn a_connection_ends_in_the_middle_of_an_answer() {
    for (end, bytes) in [(End::Close, 3), (End::Reset, 1), (End::Close, 0)] {
        let (proxy, mut client, got) = set_up().await;
        proxy.strike(Strike::After { direction: Direction::Answers, bytes, end });
        client.write_all(b"ping").await.unwrap();
        let (answer, ended) = drain(&mut client).await;
        // a reset may overtake what was sent before it
        assert!(if end == End::Reset { answer.len() <= bytes } else { answer.len() == bytes });
        assert_eq!(ended.is_err(), end == End::Reset, "{ended:?}");
        assert_eq!(*got.borrow(), 8, "the request did not arrive whole");
    }
}

#[tokio::test]
async fn a_connection_ends_in_the_middle_of_a_request() {
    let (proxy, mut client, mut got) = set_up().await;
    let (direction, bytes, end) = (Direction::Requests, 6, End::Close);
    proxy.strike_next(Strike::After { direction, bytes, end });
    timeout(LONG, ask(&mut client)).await.unwrap().unwrap();
    client.write_all(b"ping").await.unwrap();
    let _ended = drain(&mut client).await;
    assert!(timeout(LONG, got.wait_for(|got| *got == 4 + 6)).await.unwrap().is_ok());
}

#[tokio::test]
async fn a_strike_that_is_taken_back_hits_nobody() {
    let (proxy, mut client, _got) = set_up().await;
    proxy.strike_next(Strike::End(End::Close));
    proxy.disarm();
    timeout(LONG, ask(&mut client)).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_black_hole_can_open_in_the_middle_of_an_answer() {
    let (proxy, mut client, _got) = set_up().await;
    let (direction, bytes, end) = (Direction::Answers, 2, End::BlackHole);
    proxy.strike_next(Strike::After { direction, bytes, end });
    client.write_all(b"ping").await.unwrap();
    let mut answer = [0; 2];
    timeout(LONG, client.read_exact(&mut answer)).await.unwrap().unwrap();
    assert!(timeout(SHORT, client.read(&mut answer)).await.is_err(), "more came");
}

#[tokio::test]
async fn a_trickle_is_slow_and_complete() {
    let (proxy, mut client, _got) = set_up().await;
    let every = Duration::from_millis(10);
    proxy.set(Direction::Requests, Weather::clear().trickle(1, every));
    let start = Instant::now();
    client.write_all(b"0123456789").await.unwrap();
    let mut answer = [0; 10];
    timeout(LONG, client.read_exact(&mut answer)).await.unwrap().unwrap();
    assert_eq!(&answer, b"0123456789");
    assert!(start.elapsed() >= every * 9, "it took {:?}", start.elapsed());
}

#[tokio::test]
async fn what_was_done_is_recorded() {
    let (proxy, mut client, _got) = set_up().await;
    proxy.set(Direction::Answers, Weather::silent());
    proxy.strike(Strike::End(End::Reset));
    let _ended = drain(&mut client).await;
    let closed = async {
        while !proxy.connections().is_empty() {
            tokio::task::yield_now().await;
        }
    };
    timeout(LONG, closed).await.expect("the connection ends");
    let record = proxy.record();
    let what: Vec<_> = record.iter().map(|record| record.what).collect();
    let weather = What::Weather(Direction::Answers, Weather::silent());
    let struck = What::Struck(Strike::End(End::Reset));
    assert_eq!(what[..3], [What::Opened, weather, struck]);
    assert!(record[2].to_string().ends_with(" reset"), "{}", record[2]);
}
