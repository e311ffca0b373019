//! The *warden*: a small process beside a job, which does what is left to do when `leasehold` is
//! gone without a word, i.e. killed. It ends the job's group, since nobody would notice a loss any
//! more; then it frees what the job ran under, where the store would keep that until its ttl has
//! passed.

use std::ffi::OsString;
use std::fmt;
use std::io::{BufRead, BufReader, Write, stdin};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use leasehold::{ErrorKind, FencingToken, Key, Kind, Result};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::group::lives;
use super::helper::this_program;
use crate::failure::Failure;
use crate::store;
use crate::ui::{Format, Ui};

/// The argument by which it is known.
pub(super) const ARGUMENT: &str = "__ward";
/// What it is called in a list of processes: it must outlive a `killall leasehold`.
const NAME: &str = "lh-warden";
/// What it is told when the job has ended, and when it was freed.
const ENDED: &str = "ended";
const FREED: &str = "freed";
/// How often it looks whether the group is empty.
const LOOK: Duration = Duration::from_millis(20);
/// A killed group that does not go, and a store that does not answer, are given up after so long:
/// the ttl frees then.
const PERSISTENCE: Duration = Duration::from_secs(60);
/// One try to free takes at most so long.
const TRY_LIMIT: Duration = Duration::from_secs(10);
/// The pauses between two tries, from and to.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

/// What a killed holder leaves held: the store does not free it before its ttl has passed.
#[derive(Clone)]
pub(super) struct Legacy {
    /// The store's URL, with its password: told through a pipe, where nobody sees it.
    pub(super) store: String,
    pub(super) kind: Kind,
    pub(super) key: Key,
    pub(super) token: FencingToken,
}

impl fmt::Debug for Legacy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, key, token, .. } = self;
        write!(f, "Legacy({kind} {key}, {token})") // the URL has a password
    }
}

/// The warden, as the command sees it.
#[derive(Debug)]
pub(super) struct Warden {
    child: Child,
    orders: ChildStdin,
}

impl Warden {
    /// Starts one for what a job will run under.
    pub(super) fn start(
        ui: Ui,
        grace: Duration,
        legacy: Option<&Legacy>,
    ) -> std::result::Result<Self, Failure> {
        let mut command = Command::new(this_program()?);
        command.arg0(NAME).arg(ARGUMENT).arg(grace.as_millis().to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::null()).process_group(0);
        let failed = |error| Failure::system("cannot start a process", &error);
        let mut child = command.spawn().map_err(failed)?;
        let orders = child.stdin.take().ok_or_else(|| failed(std::io::ErrorKind::Other.into()))?;
        let mut warden = Self { child, orders };
        warden.tell(&Order::to_json(ui, legacy).to_string())?;
        Ok(warden)
    }

    /// Lets it ward this group, which must not run before.
    pub(super) fn ward(&mut self, group: Pid) -> std::result::Result<(), Failure> {
        self.tell(&group.to_string())
    }

    fn tell(&mut self, line: &str) -> std::result::Result<(), Failure> {
        let failed = |error| Failure::system("cannot ward the command", &error);
        writeln!(self.orders, "{line}").map_err(failed)
    }

    /// Lets it leave the group alone: the job has ended, and its number may become another's.
    pub(super) fn job_ended(&mut self) {
        drop(self.tell(ENDED));
    }

    /// Lets it go.
    pub(super) fn dismiss(mut self) {
        drop(self.tell(FREED));
        drop(self.orders);
        drop(self.child.wait());
    }
}

/// What it is told to do.
#[derive(Debug)]
struct Order {
    ui: Ui,
    legacy: Option<Legacy>,
}

impl Order {
    fn to_json(ui: Ui, legacy: Option<&Legacy>) -> Value {
        let legacy = legacy.map(|legacy| {
            json!({
                "store": legacy.store, "kind": legacy.kind.as_str(), "key": legacy.key.as_str(),
                "token": legacy.token.value(),
            })
        });
        json!({"json": ui.is_json(), "quiet": ui.quiet, "legacy": legacy})
    }

    fn parse(line: &str) -> Option<Self> {
        let order: Value = serde_json::from_str(line).ok()?;
        let format = if order["json"].as_bool()? { Format::Json } else { Format::Human };
        let ui = Ui { format, quiet: order["quiet"].as_bool()? };
        let legacy = &order["legacy"];
        let legacy = match legacy.is_null() {
            true => None,
            false => Some(Legacy {
                store: legacy["store"].as_str()?.to_owned(),
                kind: Kind::ALL.into_iter().find(|kind| legacy["kind"] == kind.as_str())?,
                key: Key::new(legacy["key"].as_str()?).ok()?,
                token: FencingToken(legacy["token"].as_u64()?),
            }),
        };
        Some(Self { ui, legacy })
    }
}

/// The number of a group that may be ended.
fn group(line: &str) -> Option<Pid> {
    line.parse().ok().filter(|group| *group > 1).map(Pid::from_raw)
}

/// The process: its exit code.
pub(super) fn ward(mut args: impl Iterator<Item = OsString>) -> u8 {
    #[cfg(target_os = "linux")]
    if let Ok(name) = std::ffi::CString::new(NAME) {
        let _ = nix::sys::prctl::set_name(&name); // a name only
    }
    let grace = args.next().and_then(|millis| millis.to_str()?.parse().ok());
    let Some(grace) = grace.map(Duration::from_millis) else { return crate::exit::USAGE };
    let mut lines = BufReader::new(stdin()).lines().map_while(std::io::Result::ok);
    let Some(order) = lines.next().and_then(|line| Order::parse(&line)) else {
        return crate::exit::OK;
    };
    // none: the job was never started, nor will be
    let group = lines.next().and_then(|line| group(&line));
    // whatever else it hears: that the other end is closed
    let has_ended = lines.next().as_deref() == Some(ENDED);
    if has_ended && lines.next().as_deref() == Some(FREED) {
        return crate::exit::OK;
    }
    let gone = has_ended || group.is_none_or(|group| end(group, &order, grace));
    match &order.legacy {
        // what runs on is protected until the ttl has passed
        Some(legacy) if gone => free(order.ui, legacy),
        _ => {}
    }
    crate::exit::OK
}

/// Ends the group; whether it is gone.
fn end(group: Pid, order: &Order, grace: Duration) -> bool {
    if !lives(group) {
        return true;
    }
    let text = "was killed, so the command that it ran is ended";
    order.ui.news("orphaned", json!({}), text);
    let _ = killpg(group, Signal::SIGTERM); // gone: looked at below
    let _ = killpg(group, Signal::SIGCONT); // a stopped process would never see it
    if !is_gone_within(group, grace) {
        let _ = killpg(group, Signal::SIGKILL);
        return order.legacy.is_some() && is_gone_within(group, PERSISTENCE);
    }
    true
}

fn is_gone_within(group: Pid, time: Duration) -> bool {
    let start = Instant::now();
    while lives(group) {
        if start.elapsed() >= time {
            return false;
        }
        std::thread::sleep(LOOK);
    }
    true
}

/// Frees what is left, unless somebody else has it by now.
fn free(ui: Ui, legacy: &Legacy) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let freed = match runtime {
        Ok(runtime) => runtime.block_on(freed(legacy)).map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    if let Err(error) = freed {
        let Legacy { kind, key, .. } = legacy;
        let text = format!("{kind} {key} is free only when its ttl has passed: {error}");
        ui.news("unconfirmed", json!({"error": error}), &text);
    }
}

/// Tries again while the store does not answer.
async fn freed(legacy: &Legacy) -> Result<()> {
    let start = Instant::now();
    let mut pause = PAUSES.0;
    loop {
        let error = match tokio::time::timeout(TRY_LIMIT, try_to_free(legacy)).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => error,
            Err(_) => {
                let detail = format!("no answer within {TRY_LIMIT:?}");
                leasehold::Error::new(ErrorKind::Unavailable, detail)
            }
        };
        let will_do = matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Backend);
        if !will_do || start.elapsed() >= PERSISTENCE {
            return Err(error);
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSES.1);
    }
}

async fn try_to_free(legacy: &Legacy) -> Result<()> {
    let opened = leasehold::connect(&legacy.store).await?;
    let freed = opened.release_by_token(legacy.kind, &legacy.key, legacy.token).await;
    store::close(&opened).await;
    freed.map(|_| ()) // somebody else's by now is as good
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_survives_its_way() {
        let ui = Ui { format: Format::Json, quiet: true };
        let legacy = Legacy {
            store: "redis://me:p\"w\n@host/?namespace=a%20b".to_owned(),
            kind: Kind::Lease,
            key: Key::new("two\nlines \u{1F512}").unwrap(),
            token: FencingToken(u64::MAX),
        };
        let line = Order::to_json(ui, Some(&legacy)).to_string();
        assert_eq!(line.lines().count(), 1, "{line}");
        let order = Order::parse(&line).unwrap();
        assert!(order.ui.is_json() && order.ui.quiet);
        let told = order.legacy.unwrap();
        assert_eq!((&told.store, told.kind, &told.key), (&legacy.store, legacy.kind, &legacy.key));
        assert_eq!(told.token, legacy.token);
        let line = Order::to_json(ui, None).to_string();
        assert!(Order::parse(&line).unwrap().legacy.is_none());
        for wrong in ["", "{}", "77"] {
            assert!(Order::parse(wrong).is_none(), "{wrong}");
        }
    }

    #[test]
    fn no_other_groups_are_ended() {
        assert_eq!(group("77"), Some(Pid::from_raw(77)));
        for wrong in ["", "0", "1", "-1", "-77", "ended", "77x"] {
            assert_eq!(group(wrong), None, "{wrong}");
        }
    }
}
