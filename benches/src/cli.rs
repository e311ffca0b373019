//! The command line.

use std::path::PathBuf;

use clap::{ArgGroup, Parser};
use leasehold_conformance::servers::Kind;

use crate::scene::{Effort, Scenario};

/// The stores of a run that names none.
pub const STORES: [Kind; 5] =
    [Kind::Postgres15, Kind::MySql, Kind::MariaDb, Kind::Redis7, Kind::Valkey];

/// leasehold next to the raw drivers and to the libraries that one could take instead.
#[derive(Clone, Debug, Parser)]
#[command(name = "bench", bin_name = "./bench")]
#[command(group(ArgGroup::new("effort").args(["quick", "smoke"])))]
pub struct Cli {
    /// The stores: postgres, postgres17, postgres18, mysql, mariadb, mariadb11, redis, redis8,
    /// valkey [default: postgres mysql mariadb redis valkey]
    #[arg(value_name = "STORE", value_parser = store)]
    pub stores: Vec<Kind>,

    /// Only scenarios whose names contain this; may be given several times
    #[arg(short, long = "scenario", value_name = "NAME")]
    pub scenarios: Vec<String>,

    /// Few rounds: much sooner done, but small differences drown in the spread
    #[arg(short, long)]
    pub quick: bool,

    /// Only that everything works: the numbers mean nothing
    #[arg(long)]
    pub smoke: bool,

    /// Saves the run under a name, or in a file if it has a / or ends in .json
    #[arg(long, value_name = "NAME|FILE")]
    pub save: Option<PathBuf>,

    /// Tells what changed since a saved run, and what of it is noise
    #[arg(long, value_name = "NAME|FILE")]
    pub compare: Option<PathBuf>,

    /// Writes the report of a saved run, and plays nothing
    #[arg(long, value_name = "NAME|FILE", conflicts_with_all = ["stores", "scenarios", "effort", "save"])]
    pub render: Option<PathBuf>,

    /// Puts the figures into a page, where that has marks for them
    #[arg(long, value_name = "FILE")]
    pub into: Vec<PathBuf>,

    /// The folder of the report
    #[arg(long, value_name = "FOLDER", default_value = "target/bench")]
    pub out: PathBuf,

    /// Lists the scenarios
    #[arg(long)]
    pub list: bool,
}

impl Cli {
    /// How thorough the run is.
    pub fn effort(&self) -> Effort {
        match (self.smoke, self.quick) {
            (true, _) => Effort::Smoke,
            (false, true) => Effort::Quick,
            (false, false) => Effort::Full,
        }
    }

    /// The stores that are meant.
    pub fn stores(&self) -> Vec<Kind> {
        if self.stores.is_empty() { STORES.to_vec() } else { self.stores.clone() }
    }

    /// Whether a scenario is meant.
    pub fn wants(&self, scenario: &Scenario) -> bool {
        self.scenarios.is_empty() || self.scenarios.iter().any(|part| scenario.name.contains(part))
    }

    /// The file of a saved run: a name means one below the report's folder.
    pub fn file(&self, saved: &std::path::Path) -> PathBuf {
        let is_file = saved.components().count() > 1
            || saved.extension().is_some_and(|extension| extension == "json");
        if is_file {
            saved.to_owned()
        } else {
            self.out.join("saved").join(saved).with_extension("json")
        }
    }
}

fn store(name: &str) -> Result<Kind, String> {
    let kind: Kind = name.parse().map_err(|error| format!("{error}"))?;
    if kind == Kind::PgBouncer {
        return Err("a pgbouncer is not a store".into());
    }
    Ok(kind)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn parsed(words: &[&str]) -> Result<Cli, clap::Error> {
        Cli::try_parse_from([&["bench"], words].concat())
    }

    #[test]
    fn nothing_means_everything() {
        let cli = parsed(&[]).unwrap();
        assert_eq!((cli.stores(), cli.effort()), (STORES.to_vec(), Effort::Full));
        assert!(crate::scenarios::ALL.iter().all(|scenario| cli.wants(scenario)));
    }

    #[test]
    fn stores_and_scenarios_are_chosen_by_name() {
        let cli = parsed(&["pg", "valkey", "-s", "hand", "--quick"]).unwrap();
        assert_eq!(cli.stores(), [Kind::Postgres15, Kind::Valkey]);
        assert_eq!(cli.effort(), Effort::Quick);
        let wanted = crate::scenarios::ALL.iter().filter(|scenario| cli.wants(scenario));
        assert_eq!(wanted.map(|scenario| scenario.name).collect::<Vec<_>>(), ["hand-off"]);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let refusal = |words: &[&str]| parsed(words).unwrap_err().to_string();
        assert!(refusal(&["oracle"]).contains("no server is called \"oracle\""));
        assert!(refusal(&["pgbouncer"]).contains("not a store"));
        assert!(refusal(&["--quick", "--smoke"]).contains("cannot be used with"));
        assert!(refusal(&["--render", "a", "--quick"]).contains("cannot be used with"));
    }

    #[test]
    fn a_saved_run_has_a_name_or_a_file() {
        let cli = parsed(&["--out", "x"]).unwrap();
        assert_eq!(cli.file(Path::new("before")), Path::new("x/saved/before.json"));
        assert_eq!(cli.file(Path::new("before.json")), Path::new("before.json"));
        assert_eq!(cli.file(Path::new("a/b")), Path::new("a/b"));
    }
}
