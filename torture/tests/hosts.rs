//! Clients on hosts of their own: the link to the server's host is cut and loses packets, so that
//! TCP itself is what is tested. Ignored, with the reason, where a machine has no such hosts.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use leasehold_torture::run::{Options, hosts_possible, run};
use leasehold_torture::store::StoreKind;
use libtest_mimic::{Arguments, Trial};

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let possible = hosts_possible();
    let trials = [StoreKind::Postgres, StoreKind::Redis].map(|store| match &possible {
        Ok(()) => Trial::test(format!("hosts_of_their_own_on_{store}"), move || {
            torture(store).map_err(Into::into)
        }),
        Err(reason) => {
            let name = format!("hosts_of_their_own_on_{store} (not here: {reason})");
            Trial::test(name, || Ok(())).with_ignored_flag(true)
        }
    });
    libtest_mimic::run(&arguments, trials.into()).exit_code()
}

fn torture(store: StoreKind) -> Result<(), String> {
    let record = tempfile::tempdir().map_err(|error| error.to_string())?;
    let report = run(&Options {
        store,
        length: Duration::from_secs(20),
        seed: 3,
        clients: 3,
        mutant: None,
        hosts: true,
        program: PathBuf::from(env!("CARGO_BIN_EXE_torture")),
        record: record.path().to_owned(),
    })?;
    let made = |label: &str| report.made.get(label).copied().unwrap_or(0);
    if made("partition of the hosts") == 0 || made("loss of packets") == 0 {
        return Err(format!("expected partitions and losses of packets\n{report}"));
    }
    if report.violations.is_empty() { Ok(()) } else { Err(report.to_string()) }
}
