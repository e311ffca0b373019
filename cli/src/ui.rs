//! [`Ui`]: what is printed, for people or for programs. A reader that went away is no reason to
//! fail.

use std::io::{IsTerminal, Write, stderr, stdout};

use clap::ValueEnum;
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::style;
use crate::table::Table;

/// What `--output` takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Tables and colours on a terminal, tab-separated lines in a pipe.
    Human,
    /// JSON; see the README for the fields.
    Json,
}

/// What `--color` takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Color {
    /// On a terminal, unless `NO_COLOR` is set.
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

impl Color {
    /// Makes it the choice of the whole process.
    pub(crate) fn choose(self) {
        let choice = match self {
            Self::Auto => anstream::ColorChoice::Auto,
            Self::Always => anstream::ColorChoice::Always,
            Self::Never => anstream::ColorChoice::Never,
        };
        choice.write_global();
    }
}

/// How this process speaks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ui {
    pub(crate) format: Format,
    pub(crate) quiet: bool,
}

impl Ui {
    /// Whether JSON is wanted.
    pub(crate) fn is_json(self) -> bool {
        self.format == Format::Json
    }

    /// Whether a person looks at the standard output.
    pub(crate) fn is_terminal(self) -> bool {
        !self.is_json() && stdout().is_terminal()
    }

    /// Whether a person looks at the standard error.
    pub(crate) fn shows_progress(self) -> bool {
        !self.is_json() && !self.quiet && stderr().is_terminal()
    }

    /// The result of a command.
    #[allow(clippy::unused_self)] // all that is said is said by it
    pub(crate) fn print(self, text: &str) {
        let mut out = anstream::stdout().lock();
        drop(out.write_all(text.as_bytes()).and_then(|()| out.flush()));
    }

    /// The result as a document of JSON: in lines for people, on one line in a pipe.
    pub(crate) fn print_json(self, value: &Value) {
        let text = match stdout().is_terminal() {
            true => format!("{value:#}\n"),
            false => format!("{value}\n"),
        };
        self.print(&text);
    }

    /// A table, aligned for people.
    pub(crate) fn print_table(self, table: &Table) {
        match self.is_terminal() {
            true => self.print(&table.aligned()),
            false => self.print(&table.plain()),
        }
    }

    /// A result in words that only a person needs.
    pub(crate) fn remark(self, text: &str) {
        if self.is_terminal() && !self.quiet {
            self.print(&format!("{text}\n"));
        }
    }

    /// News on the standard error, as JSON `{"event": name, …}` if that is wanted.
    pub(crate) fn news(self, event: &str, mut fields: Value, text: &str) {
        if self.is_json() {
            fields["event"] = json!(event);
            say(&format!("{fields}\n"));
        } else if !self.quiet {
            let dim = style::DIM;
            say(&format!("{dim}leasehold:{dim:#} {text}\n"));
        }
    }

    /// Why the command failed, and what to do next.
    pub(crate) fn failure(self, failure: &Failure) {
        if self.is_json() {
            say(&format!("{}\n", failure.to_json()));
            return;
        }
        let bad = style::BAD;
        say(&format!("{bad}leasehold:{bad:#} {}\n", failure.message()));
        if !failure.advice().is_empty() {
            let dim = style::DIM;
            say(&format!("{dim}next:{dim:#} {}\n", failure.advice()));
        }
    }
}

/// Writes to the standard error.
fn say(text: &str) {
    let mut out = anstream::stderr().lock();
    drop(out.write_all(text.as_bytes()));
}
