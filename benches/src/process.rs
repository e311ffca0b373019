//! This program again, as a process of its own.

use std::env;
use std::process::Stdio;

use leasehold_peers::Outcome;
use serde::Serialize;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

/// A process that was given a job, says what comes of it line by line, and ends with its input. It is
/// killed when this is dropped.
#[derive(Debug)]
pub(crate) struct Process {
    process: Child,
    tells: ChildStdin,
    says: Lines<BufReader<ChildStdout>>,
}

impl Process {
    /// Starts it with a word that says what it is to do, and with what it needs to know for that.
    pub(crate) fn start(word: &str, job: &impl Serialize) -> Outcome<Self> {
        let mut process = Command::new(env::current_exe()?)
            .arg(word)
            .arg(serde_json::to_string(job)?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // a turn that takes too long is dropped
            .kill_on_drop(true)
            .spawn()?;
        let tells = process.stdin.take().ok_or("it was asked to be piped")?;
        let says = process.stdout.take().ok_or("it was asked to be piped")?;
        Ok(Self { process, tells, says: BufReader::new(says).lines() })
    }

    /// Its number, while it runs.
    pub(crate) fn id(&self) -> Outcome<u32> {
        Ok(self.process.id().ok_or("it has ended")?)
    }

    /// Tells it a line.
    pub(crate) async fn tell(&mut self, line: &str) -> Outcome {
        self.tells.write_all(format!("{line}\n").as_bytes()).await?;
        Ok(self.tells.flush().await?)
    }

    /// What it says next; an error if that is one.
    pub(crate) async fn line(&mut self) -> Outcome<String> {
        let line = self.says.next_line().await?.ok_or("a process ended early")?;
        match line.strip_prefix("failed: ") {
            Some(why) => Err(why.into()),
            None => Ok(line),
        }
    }

    /// Waits until it says this word.
    pub(crate) async fn expect(&mut self, word: &str) -> Outcome {
        let line = self.line().await?;
        if line == word { Ok(()) } else { Err(format!("a process said {line:?}").into()) }
    }

    /// Ends it.
    pub(crate) async fn end(self) -> Outcome {
        let Self { mut process, tells, .. } = self;
        drop(tells);
        let status = process.wait().await?;
        status.success().then_some(()).ok_or_else(|| format!("it ended with {status}").into())
    }
}
