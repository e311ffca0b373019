//! What a run found out, as JSON, Markdown and HTML.

mod content;
mod document;
mod excerpt;
mod machine;
mod plot;

use std::fs;
use std::path::{Path, PathBuf};

use leasehold_peers::Outcome;
use serde::{Deserialize, Serialize};

use crate::compare::Line;
use crate::record::Record;

pub use content::{number, summary};
pub use excerpt::insert;
pub use machine::Machine;
pub(crate) use machine::crates;

/// A run: everything that its report is made of.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// When it ended, in seconds since 1970.
    pub at: u64,
    /// The command that repeats it.
    pub command: String,
    /// How many seconds it took.
    pub seconds: u64,
    /// Where it ran.
    pub machine: Machine,
    /// The servers: names and versions.
    pub servers: Vec<(String, String)>,
    /// The crates that take part: names and versions.
    pub crates: Vec<(String, String)>,
    /// What has to be known of contenders, by store and name.
    pub notes: Vec<Note>,
    /// The measures.
    pub records: Vec<Record>,
    /// Scenarios that could not be played: store, name, why.
    pub failures: Vec<(String, String, String)>,
}

/// What has to be known of a contender.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    /// The contender.
    pub contender: String,
    /// The stores on which it is said.
    pub stores: Vec<String>,
    /// What.
    pub note: String,
}

impl Report {
    /// Reads a saved run.
    ///
    /// # Errors
    /// When the file is not there or is none.
    pub fn read(path: &Path) -> Outcome<Self> {
        let text =
            fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
        let report = serde_json::from_str(&text);
        Ok(report.map_err(|error| format!("{} is no saved run: {error}", path.display()))?)
    }

    /// Saves the run, to be read again.
    ///
    /// # Errors
    /// When the file can't be written.
    pub fn save(&self, path: &Path) -> Outcome {
        write(path, &serde_json::to_string_pretty(self)?)
    }

    /// Writes `report.json`, `report.md` with its plots, and `report.html`; gives their names.
    ///
    /// # Errors
    /// When a file can't be written.
    pub fn write(&self, folder: &Path, changes: Option<&[Line]>) -> Outcome<Vec<PathBuf>> {
        let document = content::document(self, changes);
        let [json, markdown, html] =
            ["report.json", "report.md", "report.html"].map(|name| folder.join(name));
        let plots = folder.join("plots");
        if plots.exists() {
            // those of scenarios that this run has not
            fs::remove_dir_all(&plots)?;
        }
        for (name, svg) in document.plots() {
            write(&plots.join(format!("{name}.svg")), svg)?;
        }
        self.save(&json)?;
        write(&markdown, &document.markdown("plots"))?;
        write(&html, &document.html())?;
        Ok(vec![json, markdown, html])
    }
}

fn write(path: &Path, text: &str) -> Outcome {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    Ok(fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))?)
}
