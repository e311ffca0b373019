//! What is said about a wrong command line, without the password that it may hold.

use std::process::ExitCode;

use clap::Error;

use crate::exit;

/// Prints help, version or what is wrong, and gives the exit code.
pub(crate) fn exit(error: &Error) -> ExitCode {
    let text = scrubbed(&error.render().ansi().to_string(), std::env::args().skip(1));
    if error.use_stderr() {
        anstream::eprint!("{text}");
        return ExitCode::from(exit::USAGE);
    }
    anstream::print!("{text}");
    ExitCode::SUCCESS
}

/// The text with `***` for the passwords of the URLs among the arguments.
fn scrubbed(text: &str, args: impl Iterator<Item = String>) -> String {
    let mut text = text.to_owned();
    for arg in args {
        // an option may bring its URL along: --store=postgres://…
        let url = match arg.split_once('=') {
            Some((option, url)) if option.starts_with('-') => url,
            _ => arg.as_str(),
        };
        let shown = leasehold::redacted(url);
        if url.contains(':') && shown != url {
            text = text.replace(url, &shown);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_among_the_arguments_is_not_repeated() {
        let args = ["--stroe=pg://me:s3cret@db/a", "pg://me:s3cret@db/b", "name"];
        let said = "unexpected argument '--stroe=pg://me:s3cret@db/a' or pg://me:s3cret@db/b name";
        let told = scrubbed(said, args.iter().map(ToString::to_string));
        assert_eq!(told, "unexpected argument '--stroe=pg://me:***@db/a' or pg://me:***@db/b name");
    }
}
