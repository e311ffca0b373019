//! [`Table`]: aligned and coloured on a terminal, tab-separated in a pipe.

use std::fmt::Write;

use anstyle::Style;
use unicode_width::UnicodeWidthStr;

use crate::style;

/// A cell: a text of one line, and how it looks on a terminal.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cell {
    text: String,
    style: Style,
}

impl Cell {
    pub(crate) fn styled(text: impl AsRef<str>, style: Style) -> Self {
        Self { text: printable(text.as_ref()), style }
    }
}

impl<T: AsRef<str>> From<T> for Cell {
    fn from(text: T) -> Self {
        Self::styled(text, Style::new())
    }
}

/// Rows of cells under a head.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    head: Vec<&'static str>,
    rows: Vec<Vec<Cell>>,
}

impl Table {
    pub(crate) fn new(head: &[&'static str]) -> Self {
        Self { head: head.to_vec(), rows: Vec::new() }
    }

    pub(crate) fn row(&mut self, cells: Vec<Cell>) {
        self.rows.push(cells);
    }

    /// For people: a head, and columns.
    pub(crate) fn aligned(&self) -> String {
        let head = self.head.iter().map(|title| Cell::styled(title, style::DIM)).collect();
        let rows: Vec<&Vec<Cell>> = std::iter::once(&head).chain(&self.rows).collect();
        let width = |column: usize| {
            let widths = rows.iter().filter_map(|row| row.get(column));
            widths.map(|cell| cell.text.width()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.head.len()).map(width).collect();
        let mut text = String::new();
        for row in rows {
            for (at, cell) in row.iter().enumerate() {
                let style = cell.style;
                let _ = write!(text, "{style}{}{style:#}", cell.text);
                if at + 1 < row.len() {
                    let gap = widths[at] - cell.text.width() + 2;
                    let _ = write!(text, "{:gap$}", "");
                }
            }
            text.push('\n');
        }
        text
    }

    /// For programs: a line a row, a tab between cells, no head.
    pub(crate) fn plain(&self) -> String {
        let line = |row: &Vec<Cell>| {
            let cells: Vec<&str> = row.iter().map(|cell| cell.text.as_str()).collect();
            cells.join("\t") + "\n"
        };
        self.rows.iter().map(line).collect()
    }
}

/// Without what could end a line, move the cursor or change colours: names come from anywhere.
pub(crate) fn printable(text: &str) -> String {
    let shown = |c: char| match c {
        '\t' => "\\t".to_owned(),
        '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
            c.escape_unicode().to_string()
        }
        c if c.is_control() => c.escape_default().to_string(),
        c => c.to_string(),
    };
    text.chars().map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_whatever_the_width_of_a_letter() {
        let mut table = Table::new(&["KEY", "AGE"]);
        table.row(vec!["é漢字".into(), "1s".into()]);
        table.row(vec!["longer-key".into(), Cell::styled("2s", style::BAD)]);
        let plain = anstream::adapter::strip_str(&table.aligned()).to_string();
        assert_eq!(plain, "KEY         AGE\né漢字       1s\nlonger-key  2s\n");
        assert_eq!(table.plain(), "é漢字\t1s\nlonger-key\t2s\n");
    }

    #[test]
    fn a_name_cannot_play_tricks_on_the_terminal() {
        assert_eq!(printable("a\x1b[31m\n\tb\u{202e}"), "a\\u{1b}[31m\\n\\tb\\u{202e}");
    }
}
