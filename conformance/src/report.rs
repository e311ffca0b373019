//! What the runner prints: for people, or as the JSON events of Rust's test harness.

use std::io::{IsTerminal, Write, stdout};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, ColorSetting, FormatSetting};
use serde_json::json;

use crate::case::Case;

/// How a case ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It holds.
    Passed,
    /// It does not: what was expected, and what happened instead.
    Failed(String),
    /// It was not run, for this reason.
    Ignored(String),
}

pub(crate) struct Report {
    format: FormatSetting,
    color: bool,
    start: Instant,
    total: usize,
    passed: usize,
    ignored: usize,
    failures: Vec<(&'static str, &'static str, String)>,
}

impl Report {
    pub(crate) fn new(args: &Arguments, total: usize) -> Self {
        let format = match args.format {
            Some(format) => format,
            None if args.quiet => FormatSetting::Terse,
            None => FormatSetting::Pretty,
        };
        let color = match args.color {
            Some(ColorSetting::Always) => true,
            Some(ColorSetting::Never) => false,
            Some(ColorSetting::Auto) | None => stdout().is_terminal(),
        };
        Self {
            format,
            color,
            start: Instant::now(),
            total,
            passed: 0,
            ignored: 0,
            failures: Vec::new(),
        }
    }

    pub(crate) fn title(&self, harness: &str) {
        match self.format {
            FormatSetting::Json => print_line(
                &json!({"type": "suite", "event": "started", "test_count": self.total, "harness": harness}).to_string(),
            ),
            _ => print_line(&format!("\nrunning {} cases on {harness}", self.total)),
        }
    }

    pub(crate) fn case(&mut self, case: &'static Case, outcome: Outcome, time: Duration) {
        self.print_case(case, &outcome, time);
        match outcome {
            Outcome::Passed => self.passed += 1,
            Outcome::Ignored(_) => self.ignored += 1,
            Outcome::Failed(message) => self.failures.push((case.name, case.about, message)),
        }
    }

    fn print_case(&self, case: &Case, outcome: &Outcome, time: Duration) {
        let seconds = time.as_secs_f64();
        let (word, color, detail) = match outcome {
            Outcome::Passed => ("ok", "32", ""),
            Outcome::Failed(message) => ("FAILED", "31", message.as_str()),
            Outcome::Ignored(reason) => ("ignored", "33", reason.as_str()),
        };
        match self.format {
            FormatSetting::Json => {
                let event = word.to_lowercase();
                let mut line = json!({
                    "type": "test", "event": event, "name": case.name, "exec_time": seconds,
                });
                match outcome {
                    Outcome::Passed => {}
                    Outcome::Failed(message) => line["stdout"] = json!(message),
                    Outcome::Ignored(reason) => line["message"] = json!(reason),
                }
                let started = json!({"type": "test", "event": "started", "name": case.name});
                print_line(&format!("{started}\n{line}"));
            }
            FormatSetting::Terse => {
                let mark = match outcome {
                    Outcome::Passed => ".",
                    Outcome::Failed(_) => "F",
                    Outcome::Ignored(_) => "i",
                };
                print(&self.paint(color, mark));
            }
            FormatSetting::Pretty => {
                let width = self.total.to_string().len();
                let number = self.passed + self.ignored + self.failures.len() + 1;
                let word = self.paint(color, word);
                let more = match outcome {
                    Outcome::Ignored(_) => format!(": {detail}"),
                    _ => format!(" ({seconds:.2}s)"),
                };
                let (total, name) = (self.total, case.name);
                print_line(&format!("[{number:>width$}/{total}] {name} ... {word}{more}"));
            }
        }
    }

    /// Prints the failures and the closing counts.
    pub(crate) fn close(mut self, filtered_out: usize) -> ExitCode {
        self.failures.sort();
        let (passed, failed, ignored) = (self.passed, self.failures.len(), self.ignored);
        let seconds = self.start.elapsed().as_secs_f64();
        if let FormatSetting::Json = self.format {
            let event = if failed > 0 { "failed" } else { "ok" };
            let line = json!({
                "type": "suite", "event": event, "passed": passed, "failed": failed,
                "ignored": ignored, "measured": 0, "filtered_out": filtered_out,
                "exec_time": seconds,
            });
            print_line(&line.to_string());
        } else {
            if failed > 0 {
                print_line("\nfailures:\n");
            }
            for (name, about, message) in &self.failures {
                print_line(&format!("---- {name} ----\n{about}\n  {message}\n"));
            }
            let word = match failed {
                0 => self.paint("32", "ok"),
                _ => self.paint("31", "FAILED"),
            };
            print_line(&format!(
                "\ntest result: {word}. {passed} passed; {failed} failed; {ignored} ignored; \
                 0 measured; {filtered_out} filtered out; finished in {seconds:.2}s\n"
            ));
        }
        match failed {
            0 => ExitCode::SUCCESS,
            _ => ExitCode::from(101),
        }
    }

    fn paint(&self, color: &str, text: &str) -> String {
        if self.color { format!("\x1b[{color}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

fn print_line(text: &str) {
    print(&format!("{text}\n"));
}

/// A reader that went away is no reason to panic.
fn print(text: &str) {
    let mut out = stdout().lock();
    drop(out.write_all(text.as_bytes()).and_then(|()| out.flush()));
}
