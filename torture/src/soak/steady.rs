//! The one client that works and rests in turn.

use std::fs;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use super::grown::Sample;
use super::report::Report;
use super::{Options, told};
use crate::check::{Ends, check};
use crate::client::{Order, Role};
use crate::event::read;
use crate::run::last;
use crate::store::Lab;

/// It works and rests in turn for about so long, in a long run.
const TURN: Duration = Duration::from_secs(60);
/// It comes to rest within this time.
const REST: Duration = Duration::from_secs(60);

pub(super) async fn run(
    options: &Options,
    lab: &Arc<dyn Lab>,
    report: &mut Report,
) -> Result<(), String> {
    let mut client = Client::start(options, lab.url())?;
    let turns = (options.length.as_secs_f64() / TURN.as_secs_f64()).round().clamp(2.0, 10_000.0);
    let turn = options.length.div_f64(turns);
    let (mut samples, mut events) = (Vec::new(), 0);
    for _ in 0..turns as u32 {
        let rested = client.turn(turn).await?;
        let process = client.child.id().ok_or("the client has ended")?;
        let census = lab.census().await.map_err(told)?;
        samples.push(Sample::of(process, rested, census).map_err(told)?);
        // each time of work is a record of its own, which need not be kept
        let record = read(&options.record).map_err(told)?;
        events += record.len() as u64;
        report.violations.extend(check(options.store, &record, &Ends::unknown()));
        if report.violations.is_empty() {
            forget(options).map_err(told)?;
        }
    }
    report.samples(&samples, events);
    drop(client.say);
    let ended = tokio::time::timeout(REST, client.child.wait()).await;
    match ended {
        Ok(Ok(status)) if status.success() => {}
        Ok(other) => report.wrong(format!("the client ended with {other:?}")),
        Err(_) => report.wrong(format!("the client did not end within {REST:?}")),
    }
    // what it leaks it also leaves
    if options.leak.is_none() {
        last::leftovers(lab).await.into_iter().for_each(|left| report.wrong(left));
    }
    Ok(())
}

/// Removes the record.
fn forget(options: &Options) -> std::io::Result<()> {
    for file in fs::read_dir(&options.record)? {
        let path = file?.path();
        if path.extension().is_some_and(|extension| extension == "jsonl") {
            fs::remove_file(path)?;
        }
    }
    Ok(())
}

struct Client {
    child: Child,
    say: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Client {
    fn start(options: &Options, url: Option<String>) -> Result<Self, String> {
        let order = Order {
            store: options.store,
            url: url.unwrap_or_default(),
            client: 0,
            life: 0,
            seed: rand::random_range(1..1_000_000),
            mutant: None,
            record: options.record.clone(),
            role: Role::Steady(options.leak),
        };
        let mut child = Command::new(&options.program)
            .arg("client")
            .arg(serde_json::to_string(&order).map_err(told)?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(told)?;
        let say = child.stdin.take().ok_or("its standard input is piped")?;
        let answers = child.stdout.take().ok_or("its standard output is piped")?;
        Ok(Self { child, say, answers: BufReader::new(answers).lines() })
    }

    /// Works, and rests, for so long in all.
    async fn turn(&mut self, time: Duration) -> Result<crate::client::steady::Rested, String> {
        let work = time.saturating_sub(crate::client::steady::SETTLE);
        self.say.write_all(b"\n").await.map_err(told)?;
        tokio::time::sleep(work).await;
        self.say.write_all(b"\n").await.map_err(told)?;
        let answer = tokio::time::timeout(REST, self.answers.next_line()).await;
        let answer = answer.map_err(|_| format!("the client is not at rest within {REST:?}"))?;
        let answer = answer.map_err(told)?.ok_or("the client has ended")?;
        serde_json::from_str(&answer).map_err(told)
    }
}
