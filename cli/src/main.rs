//! The command `leasehold`: runs a job under a lock that all machines share, shows who holds what,
//! and looks after the store. See the README for operators.

#[cfg(not(unix))]
compile_error!("the command leasehold needs process groups and signals: it is for unix");

mod cli;
mod commands;
mod duration;
mod exit;
mod failure;
mod logs;
mod run;
mod store;
mod style;
mod table;
mod ui;
mod usage;
#[cfg(feature = "verify")]
mod verify;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches};

use crate::cli::{Cli, Command};
use crate::commands::{bench, completions, dedupe, doctor, list, release, show, upkeep, watch};
use crate::failure::{Failure, Outcome};
use crate::ui::Ui;

fn main() -> ExitCode {
    if let Some(code) = run::helper() {
        return ExitCode::from(code);
    }
    #[cfg(feature = "verify")]
    if let Some(code) = verify::helper() {
        return code;
    }
    let matches = match Cli::command().try_get_matches() {
        Ok(matches) => matches,
        Err(error) => return usage::exit(&error),
    };
    let cli = match Cli::from_arg_matches(&matches) {
        Ok(cli) => cli,
        Err(error) => return usage::exit(&error),
    };
    cli.globals.color.choose();
    logs::start(cli.globals.verbose, cli.globals.store.as_deref(), cli.command.is_noisy());
    let ui = Ui { format: cli.globals.output, quiet: cli.globals.quiet };
    let code = run_command(ui, &cli).unwrap_or_else(|failure| {
        ui.failure(&failure);
        failure.code()
    });
    ExitCode::from(code)
}

fn run_command(ui: Ui, cli: &Cli) -> Outcome {
    // the main thread starts all processes: where a thread ends, so do the processes that asked
    // the kernel to end with their parent
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|error| Failure::system("cannot start", &error))?;
    let outcome = runtime.block_on(async {
        let globals = &cli.globals;
        match &cli.command {
            Command::Run(args) => run::run(ui, globals, args).await,
            Command::List(args) => list::list(ui, globals, args).await,
            Command::Show(args) => show::show(ui, globals, args).await,
            Command::Watch(args) => watch::watch(ui, globals, args).await,
            Command::Release(args) => release::release(ui, globals, args).await,
            Command::Dedupe(args) => dedupe::dedupe(ui, globals, args).await,
            Command::Migrate(_) => upkeep::migrate(ui, globals).await,
            Command::Housekeep(_) => upkeep::housekeep(ui, globals).await,
            Command::Doctor(args) => doctor::doctor(ui, globals, args).await,
            #[cfg(feature = "verify")]
            Command::Verify(args) => verify::verify(ui, globals, args).await,
            Command::Bench(args) => bench::bench(ui, globals, args).await,
            Command::Completions(args) => Ok(completions::completions(ui, args)),
            Command::Man(args) => completions::man(ui, args),
        }
    });
    runtime.shutdown_background();
    outcome
}
