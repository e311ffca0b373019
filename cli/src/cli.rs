//! The command line.

use clap::{ArgAction, Args, Parser, Subcommand};

use crate::commands::{bench, completions, dedupe, doctor, list, release, show, upkeep, watch};
use crate::run;
use crate::ui::{Color, Format};

/// Named locks, leases and dedupe for scripts and operators, on the store that all machines share.
#[derive(Debug, Parser)]
#[command(name = "leasehold", version, propagate_version = true, max_term_width = 100)]
#[command(subcommand_required = true, arg_required_else_help = true)]
#[command(after_help = "\
Examples:
  leasehold run nightly-report -- ./report.sh     one machine at a time runs it
  leasehold run --try backup -- backup.sh         or not at all: exits with 75 if it runs elsewhere
  leasehold list                                  who holds what
  leasehold doctor                                is the store fit for it?

Exit codes: 0 well, 1 the answer is no, 2 wrong usage, 69 the store fails, 71 this machine fails,
75 busy, 76 lost; `leasehold run` passes on those of the job.")]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) globals: Globals,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What all subcommands take.
#[derive(Debug, Args)]
#[command(next_help_heading = "Store and output")]
pub(crate) struct Globals {
    /// The store, e.g. `postgres://user@host/database`, `mysql://…`, `redis://…`
    ///
    /// Where the URL has a password, rather set the variable `LEASEHOLD_URL`: others see a command
    /// line.
    #[arg(long, short = 's', global = true, env = "LEASEHOLD_URL", value_name = "URL")]
    #[arg(hide_env_values = true)]
    pub(crate) store: Option<String>,

    /// Keys of different namespaces never meet
    #[arg(long, global = true, env = "LEASEHOLD_NAMESPACE", value_name = "NAME")]
    pub(crate) namespace: Option<String>,

    /// The name that others are shown as the holder; default for `run`: that of the job's program
    #[arg(long, global = true, env = "LEASEHOLD_APP", value_name = "NAME")]
    pub(crate) app: Option<String>,

    /// How results are printed
    #[arg(long, short, global = true, value_name = "FORMAT", default_value = "human")]
    pub(crate) output: Format,

    /// When to use colours
    #[arg(long, global = true, value_name = "WHEN", default_value = "auto")]
    pub(crate) color: Color,

    /// Says nothing but results and errors
    #[arg(long, short, global = true)]
    pub(crate) quiet: bool,

    /// Logs what happens, -vv in detail; or set `LEASEHOLD_LOG`, e.g. leasehold=debug
    #[arg(long, short, global = true, action = ArgAction::Count)]
    pub(crate) verbose: u8,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(run::Run),
    List(list::List),
    Show(show::Show),
    Watch(watch::Watch),
    Release(release::Release),
    Dedupe(dedupe::Dedupe),
    Migrate(upkeep::Migrate),
    Housekeep(upkeep::Housekeep),
    Doctor(doctor::Doctor),
    #[cfg(feature = "verify")]
    Verify(crate::verify::Verify),
    Bench(bench::Bench),
    Completions(completions::Completions),
    Man(completions::Man),
}

impl Command {
    /// Whether it makes errors on purpose.
    pub(crate) fn is_noisy(&self) -> bool {
        match self {
            #[cfg(feature = "verify")]
            Self::Verify(_) => true,
            _ => false,
        }
    }
}
