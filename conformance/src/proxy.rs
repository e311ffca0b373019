//! [`Proxy`]: a small TCP proxy that makes the faults of a network on demand.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Forwards connections on a loopback port to a server, until it is told to make a fault.
///
/// A harness puts each handle behind a proxy of its own, so that a fault concerns that handle
/// only. Dropping the proxy closes its port and its connections.
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
    weather: watch::Sender<Weather>,
    lose_next: Arc<AtomicBool>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Weather {
    silent: bool,
    /// How many times all connections were cut.
    cuts: u64,
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
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let addr = listener.local_addr()?;
        let weather = watch::Sender::new(Weather::default());
        let lose_next = Arc::new(AtomicBool::new(false));
        tokio::spawn(accept(listener, upstream, weather.subscribe(), lose_next.clone()));
        Ok(Self { addr, weather, lose_next })
    }

    /// Where to connect instead of the server.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Lets the network go silent: connections stay open, new ones are accepted, and nothing is
    /// forwarded in either direction, also no end of a connection, until [`heal`](Self::heal).
    pub fn silence(&self) {
        self.weather.send_modify(|weather| weather.silent = true);
    }

    /// Ends the silence. What was sent meanwhile arrives now, late.
    pub fn heal(&self) {
        self.weather.send_modify(|weather| weather.silent = false);
    }

    /// Closes all connections; new ones are welcome.
    pub fn cut(&self) {
        self.weather.send_modify(|weather| weather.cuts += 1);
    }

    /// Forwards the next bytes of a client; when the server's answer to them arrives, closes that
    /// connection instead of forwarding it.
    pub fn lose_next_answer(&self) {
        self.lose_next.store(true, Ordering::SeqCst);
    }
}

async fn accept(
    listener: TcpListener,
    upstream: SocketAddr,
    mut weather: watch::Receiver<Weather>,
    lose_next: Arc<AtomicBool>,
) {
    loop {
        let client = tokio::select! {
            client = listener.accept() => client,
            () = gone(&mut weather) => return,
        };
        match client {
            Ok((client, _)) => {
                tokio::spawn(forward(client, upstream, weather.clone(), lose_next.clone()));
            }
            // a client that went away before it was accepted, or no descriptors left for now
            Err(error) => {
                tracing::debug!(%error, "no connection accepted");
                tokio::task::yield_now().await;
            }
        }
    }
}

/// Serves one connection until either side, a cut or the proxy's end closes it.
async fn forward(
    client: TcpStream,
    upstream: SocketAddr,
    mut weather: watch::Receiver<Weather>,
    lose_next: Arc<AtomicBool>,
) {
    let cuts = weather.borrow().cuts;
    let mut clear = weather.clone();
    let serve = async move {
        calm(&mut clear).await;
        let Ok(server) = TcpStream::connect(upstream).await else {
            return; // closes the client's connection, as a refusal would
        };
        // a request is often several small writes; they must not wait for one another
        drop(client.set_nodelay(true));
        drop(server.set_nodelay(true));
        let (client_reads, client_writes) = client.into_split();
        let (server_reads, server_writes) = server.into_split();
        let doomed = AtomicBool::new(false);
        let requests = pump(client_reads, server_writes, clear.clone(), || {
            if lose_next.swap(false, Ordering::SeqCst) {
                doomed.store(true, Ordering::SeqCst);
            }
            true
        });
        let answers =
            pump(server_reads, client_writes, clear.clone(), || !doomed.load(Ordering::SeqCst));
        tokio::select! {
            () = requests => {}
            () = answers => {}
        }
    };
    tokio::select! {
        () = serve => {}
        _ = weather.wait_for(|now| now.cuts != cuts) => {}
    }
}

/// Copies bytes while the weather is calm and `may_pass` says so.
async fn pump(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut weather: watch::Receiver<Weather>,
    mut may_pass: impl FnMut() -> bool,
) {
    let mut buffer = vec![0; 16 * 1024];
    loop {
        let read = from.read(&mut buffer).await;
        calm(&mut weather).await;
        match read {
            Ok(count) if count > 0 && may_pass() => {
                if to.write_all(&buffer[..count]).await.is_err() {
                    return;
                }
            }
            _ => return,
        }
    }
}

/// Waits until the network is not silent.
async fn calm(weather: &mut watch::Receiver<Weather>) {
    // an error means that the proxy is gone, which ends the connection by itself
    drop(weather.wait_for(|now| !now.silent).await);
}

/// Ends when the proxy is dropped.
async fn gone(weather: &mut watch::Receiver<Weather>) {
    while weather.changed().await.is_ok() {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::time::timeout;

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
}
