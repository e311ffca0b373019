//! Faults, made.

use std::sync::Arc;
use std::time::Duration;

use leasehold::{Backend, ErrorKind, Key};
use leasehold_conformance::proxy::{Direction, End, Strike, Weather};
use nix::sys::signal::Signal;
use tokio::sync::Mutex;

use super::clients::Client;
use super::plan::{Fault, Target};
use crate::event::{Do, Kind, Log};
use crate::store::{Lab, MemoryLab, failed};

/// The controller's hands.
#[derive(Clone)]
pub(super) struct Hands {
    pub(super) lab: Arc<dyn Lab>,
    /// The store again, where it is in memory.
    pub(super) memory: Option<Arc<MemoryLab>>,
    pub(super) clients: Arc<Vec<Mutex<Client>>>,
    /// A handle past all networks.
    pub(super) handle: Arc<dyn Backend>,
    pub(super) log: Log,
    /// Only one thing at a time is done to the server.
    pub(super) server: Arc<Mutex<()>>,
}

impl Hands {
    /// Makes a fault and ends it after its time. False: the store could not do it.
    pub(super) async fn make(&self, fault: Fault) -> Result<bool, String> {
        let what = fault.to_string();
        let told = |what: String| self.log.put(0, Do::Fault { what, forced: None });
        if !matches!(fault, Fault::Force(..)) {
            told(what.clone());
        }
        match fault {
            Fault::Weather { client, direction, weather, time } => {
                self.weather(client, direction, weather).await;
                tokio::time::sleep(time).await;
                self.weather(client, direction, Weather::clear()).await;
                told(format!("end of: {what}"));
            }
            Fault::Strike { client, strike, target, time } => {
                self.strike(client, strike, target, time).await;
            }
            Fault::Kill(client, time) => {
                let client = self.client(client);
                client.lock().await.kill().await.map_err(|error| error.to_string())?;
                tokio::time::sleep(time).await;
                client.lock().await.start(&self.lab).map_err(|error| error.to_string())?;
            }
            Fault::Stop(client, time) => {
                let client = self.client(client);
                // it is kept, so that nobody kills it meanwhile and it is not forgotten
                let client = client.lock().await;
                client.signal(Signal::SIGSTOP);
                tokio::time::sleep(time).await;
                client.signal(Signal::SIGCONT);
                told(format!("end of: {what}"));
            }
            Fault::EndSessions(client) => {
                let name = self.client(client).lock().await.name();
                let _turn = self.server.lock().await;
                return self.lab.end_sessions(&name).await.map_err(|error| error.to_string());
            }
            Fault::Force(kind, key) => return self.force(kind, key).await,
            Fault::Restart => {
                let _turn = self.server.lock().await;
                let lab = self.lab.clone();
                let restarted = tokio::task::spawn_blocking(move || lab.restart()).await;
                restarted.map_err(failed).flatten().map_err(|error| error.to_string())?;
                told(format!("end of: {what}"));
            }
            Fault::Pause(time) => {
                let Some(server) = self.lab.server() else { return Ok(false) };
                let _turn = self.server.lock().await;
                server.pause().map_err(|error| error.to_string())?;
                tokio::time::sleep(time).await;
                server.resume().map_err(|error| error.to_string())?;
                told(format!("end of: {what}"));
            }
            Fault::Partition(client, time) => {
                let client = self.client(client).lock().await;
                let Some(host) = &client.host else { return Ok(false) };
                host.link(false)?;
                tokio::time::sleep(time).await;
                host.link(true)?;
                told(format!("end of: {what}"));
            }
            Fault::Loss(client, percent, time) => {
                let client = self.client(client).lock().await;
                let Some(host) = &client.host else { return Ok(false) };
                host.lose(percent)?;
                tokio::time::sleep(time).await;
                host.lose(0)?;
                told(format!("end of: {what}"));
            }
        }
        Ok(true)
    }

    fn client(&self, client: u32) -> &Mutex<Client> {
        &self.clients[client as usize]
    }

    async fn weather(&self, client: u32, direction: Option<Direction>, weather: Weather) {
        let client = self.client(client).lock().await;
        if let Some(proxy) = &client.proxy {
            match direction {
                Some(direction) => proxy.set(direction, weather),
                None => Direction::BOTH.iter().for_each(|direction| proxy.set(*direction, weather)),
            }
        } else if let Some(link) = self.memory.as_ref().and_then(|lab| lab.link(&client.name())) {
            match weather {
                weather if weather == Weather::clear() => link.heal(),
                weather if weather.silent => link.silence(),
                weather => link.delay(weather.delay / 4),
            }
        }
    }

    async fn strike(&self, client: u32, strike: Strike, target: Target, time: Duration) {
        let client = self.client(client);
        let hole = match strike {
            Strike::End(end) | Strike::After { end, .. } => end == End::BlackHole,
            Strike::HalfClose(_) => false,
        };
        {
            let client = client.lock().await;
            if let Some(proxy) = &client.proxy {
                let open = proxy.connections();
                match target {
                    Target::All => proxy.strike(strike),
                    Target::Next => proxy.strike_next(strike),
                    Target::One(number) if !open.is_empty() => {
                        proxy.strike_on(open[number % open.len()], strike);
                    }
                    Target::One(_) => {}
                }
            } else if let Some(link) = self.memory.as_ref().and_then(|lab| lab.link(&client.name()))
            {
                match strike {
                    Strike::After { .. } => link.lose_next_answer(),
                    _ => link.end_sessions(),
                }
            }
        }
        if hole {
            // a server's kernel, too, gives a vanished client up at some time
            tokio::time::sleep(time).await;
            if let Some(proxy) = &client.lock().await.proxy {
                // one that asked nothing meanwhile would fall into the hole after its end
                proxy.disarm();
                proxy.cut();
            }
        }
    }

    async fn force(&self, kind: leasehold::Kind, name: String) -> Result<bool, String> {
        let key = Key::new(&name).map_err(|error| error.to_string())?;
        let ours = match kind {
            leasehold::Kind::Lock => Kind::Lock,
            leasehold::Kind::Lease => Kind::Lease,
            leasehold::Kind::Claim => Kind::Claim,
            leasehold::Kind::Dedupe => Kind::Dedupe,
        };
        let what = format!("the {kind} {name} is released by force");
        // before: it may have happened even if no answer comes
        self.log.put(0, Do::Fault { what, forced: Some((ours, name)) });
        let forced = self.handle.force_release(kind, &key);
        match tokio::time::timeout(Duration::from_secs(10), forced).await {
            Ok(Err(error)) if error.kind() == ErrorKind::Unsupported => Ok(false),
            Ok(Err(error)) if !error.is_retryable() => Err(error.to_string()),
            _ => Ok(true), // the server may be down right now
        }
    }

    /// Ends all faults of the networks.
    pub(super) async fn heal(&self) {
        for client in self.clients.iter() {
            let client = client.lock().await;
            if let Some(proxy) = &client.proxy {
                proxy.heal();
            } else if let Some(link) = self.memory.as_ref().and_then(|lab| lab.link(&client.name()))
            {
                link.heal();
            }
        }
    }
}
