//! `leasehold completions` and `leasehold man`.

use std::path::PathBuf;

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use crate::cli::Cli;
use crate::exit;
use crate::failure::{Failure, Outcome};
use crate::ui::Ui;

/// Prints the completions of a shell
///
/// E.g. for bash: leasehold completions bash > ~/.local/share/bash-completion/completions/leasehold
#[derive(Debug, Args)]
pub(crate) struct Completions {
    /// The shell
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

/// Prints the man page, or writes those of all subcommands
#[derive(Debug, Args)]
pub(crate) struct Man {
    /// Writes leasehold.1, leasehold-run.1 and so on into this folder instead
    #[arg(long, value_name = "FOLDER")]
    into: Option<PathBuf>,
}

pub(crate) fn completions(ui: Ui, args: &Completions) -> u8 {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "leasehold", &mut text);
    ui.print(&String::from_utf8_lossy(&text));
    exit::OK
}

pub(crate) fn man(ui: Ui, args: &Man) -> Outcome {
    let failed = |error| Failure::system("cannot write the man page", &error);
    if let Some(folder) = &args.into {
        clap_mangen::generate_to(Cli::command(), folder).map_err(failed)?;
        return Ok(exit::OK);
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(Cli::command()).render(&mut page).map_err(failed)?;
    ui.print(&String::from_utf8_lossy(&page));
    Ok(exit::OK)
}
