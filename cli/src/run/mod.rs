//! `leasehold run`: a job under a lock or a lease.

mod gate;
mod group;
mod held;
mod helper;
mod job;
mod signals;
mod terminal;
mod waiting;
mod warden;

use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use clap::{Args, ValueEnum};
use leasehold::{Key, Store};
use serde_json::json;

use self::held::Held;
pub(crate) use self::helper::helper;
use self::job::{End, Job};
use self::signals::Signals;
use self::warden::Legacy;
use crate::cli::Globals;
use crate::failure::{Failure, Outcome};
use crate::ui::Ui;
use crate::{duration, exit, store};

/// Runs a command while holding a lock, so that one machine at a time does
///
/// Waits for the lock, runs the command with the lock's name in `LEASEHOLD_KEY` and its fencing token
/// in `LEASEHOLD_TOKEN`, and frees the lock when the command ends. If the lock is lost meanwhile
/// (the store ended the session, the lease expired), the command and all of its process group get
/// TERM, and KILL after the grace.
#[derive(Debug, Args)]
#[command(after_help = "\
Exit code: that of the command, 128+n if signal n ended it; 75 busy, 76 lost, 69 the store fails,
126 and 127 the command cannot be executed or was not found, 2 wrong usage.

Signals TERM, INT, HUP, QUIT, USR1 and USR2 are passed to the command's whole process group. If
leasehold itself is killed (-9), the group gets TERM, and KILL after the grace. A lock that belongs to
a session (SQLite, Postgres, MySQL) is free at once then; a lock on Redis, and every lease, when the
group has ended.

Examples:
  leasehold run deploy -- ./deploy.sh
  leasehold run --try nightly -- nightly.sh            # cron: skip it if it runs elsewhere
  leasehold run --kind lease --ttl 1m import -- import.py
  leasehold run report -- sh -c 'psql -v token=$LEASEHOLD_TOKEN -f report.sql'")]
pub(crate) struct Run {
    /// The lock's name
    #[arg(value_name = "NAME")]
    name: String,

    /// The command and its arguments, after --
    #[arg(value_name = "COMMAND", required = true, last = true)]
    command: Vec<OsString>,

    /// A lock is free as soon as its holder's process ends; a lease outlives a dead machine by its ttl
    #[arg(long, short, value_name = "KIND", default_value = "lock")]
    kind: RunKind,

    /// How long a lease outlives its holder; renewed while the command runs [default: 30s]
    #[arg(long, value_name = "TIME", value_parser = duration::parse)]
    ttl: Option<Duration>,

    /// The longest wait: a time, 0 to try once, or forever
    #[arg(long, short, value_name = "TIME", default_value = "forever")]
    #[arg(value_parser = duration::parse_wait)]
    wait: Duration,

    /// Does not wait: the same as --wait 0
    #[arg(long = "try", short = 't', conflicts_with = "wait")]
    try_once: bool,

    /// The time between TERM and KILL for a command that must end
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration::parse)]
    grace: Duration,

    /// Exit code if somebody else holds it
    #[arg(long, value_name = "CODE", default_value_t = exit::BUSY)]
    busy_code: u8,

    /// Exit code if it was lost while the command ran
    #[arg(long, value_name = "CODE", default_value_t = exit::LOST)]
    lost_code: u8,
}

/// What `--kind` takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum RunKind {
    /// Held by the process's session with the store.
    Lock,
    /// Held for a ttl, which is renewed.
    Lease,
}

pub(crate) async fn run(ui: Ui, globals: &Globals, args: &Run) -> Outcome {
    if args.ttl.is_some() && args.kind == RunKind::Lock {
        let advice = "say --kind lease, or leave --ttl away";
        return Err(Failure::usage("a lock has no ttl", advice));
    }
    let key = Key::new(&args.name)?;
    let mut signals = Signals::listen()?;
    let program = args.command[0].to_string_lossy();
    let app = Path::new(program.as_ref()).file_name();
    let app = app.map(|name| name.to_string_lossy().into_owned());
    let acquired = tokio::select! {
        acquired = acquired(ui, globals, args, &key, app.as_deref()) => acquired?,
        signal = signals.ending() => return Ok(exit::of_signal(signal as i32)),
    };
    match acquired {
        (store, Some(held)) => {
            // what the store frees by itself at the holder's end is left to it
            let keeps = args.kind == RunKind::Lease || !store.capabilities().session_locks;
            let url = store::url(globals, app.as_deref())?;
            let legacy = keeps.then(|| Legacy {
                store: url,
                kind: args.kind.into(),
                key: key.clone(),
                token: held.token(),
            });
            let code = under(ui, args, &key, held, legacy, signals).await;
            store::close(&store).await;
            code
        }
        (store, None) => {
            waiting::busy(ui, &store, args.kind.into(), &key).await;
            store::close(&store).await;
            Ok(args.busy_code)
        }
    }
}

/// Connects and takes the lock; none if somebody else held it for the whole wait.
async fn acquired(
    ui: Ui,
    globals: &Globals,
    args: &Run,
    key: &Key,
    app: Option<&str>,
) -> Result<(Store, Option<Held>), Failure> {
    let store = store::open_as(globals, app).await?;
    let wait = if args.try_once { Duration::ZERO } else { args.wait };
    let taken = Held::take(&store, key, args.kind, args.ttl, wait);
    let taken = waiting::told(ui, &store, args.kind.into(), key, taken).await;
    let held = match taken {
        Ok(held) => held,
        Err(error) if store::made_tables(ui, &store, &error).await? => {
            let taken = Held::take(&store, key, args.kind, args.ttl, wait);
            waiting::told(ui, &store, args.kind.into(), key, taken).await?
        }
        Err(error) => return Err(error.into()),
    };
    Ok((store, held))
}

/// Runs the job under what is held, and frees it.
async fn under(
    ui: Ui,
    args: &Run,
    key: &Key,
    held: Held,
    legacy: Option<Legacy>,
    signals: Signals,
) -> Outcome {
    let token = held.token();
    let kind = leasehold::Kind::from(args.kind);
    tracing::info!(%key, %kind, %token, "held");
    let lost = held.lost();
    let job = match Job::start(ui, &args.command, (key, token), args.grace, legacy.as_ref()) {
        Ok(job) => job,
        Err(failure) => {
            drop(held.release().await); // the failure is what counts
            return Err(failure);
        }
    };
    let end = job.supervise(ui, &lost, signals).await;
    // asked before the release, which ends the hold itself
    let reason = lost.reason();
    let released = held.release().await;
    let End { code, left_behind, warden } = end?;
    warden.dismiss();
    if left_behind {
        let text = format!("{kind} {key} is free, but processes of the command still run");
        ui.news("left-behind", json!({"kind": kind.as_str(), "key": key.as_str()}), &text);
    }
    match released {
        _ if reason.is_some() => Ok(args.lost_code),
        Ok(()) => Ok(code),
        Err(error) if error.kind() == leasehold::ErrorKind::Lost => {
            let text = format!("{kind} {key} was lost before the command ended: {error}");
            let fields = json!({"kind": kind.as_str(), "key": key.as_str(), "code": code});
            ui.news("lost", fields, &text);
            Ok(args.lost_code)
        }
        Err(error) => {
            // the job has ended: its code is worth more than this one's
            let text = format!("the store did not confirm that {kind} {key} is free: {error}");
            ui.news("unconfirmed", json!({"error": error.to_string()}), &text);
            Ok(code)
        }
    }
}

impl From<RunKind> for leasehold::Kind {
    fn from(kind: RunKind) -> Self {
        match kind {
            RunKind::Lock => Self::Lock,
            RunKind::Lease => Self::Lease,
        }
    }
}
