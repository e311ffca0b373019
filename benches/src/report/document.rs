//! A text of headings, paragraphs, tables and plots, in Markdown or HTML.

use std::fmt::Write;

/// A piece of the text.
#[derive(Clone, Debug)]
pub(super) enum Block {
    /// Of a level from 1.
    Heading(usize, String),
    Paragraph(String),
    Code(String),
    Table(Table),
    /// A name, what it shows, and the SVG.
    Plot(String, String, String),
}

/// The first column is a name, the others are right-aligned unless the head begins with `<`.
#[derive(Clone, Debug, Default)]
pub(super) struct Table {
    head: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(super) fn new(head: &[&str]) -> Self {
        Self { head: head.iter().map(ToString::to_string).collect(), rows: Vec::new() }
    }

    pub(super) fn row<T: Into<String>>(&mut self, cells: impl IntoIterator<Item = T>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The heads, each with whether its column is aligned to the left.
    fn columns(&self) -> impl Iterator<Item = (bool, &str)> {
        self.head.iter().enumerate().map(|(at, head)| match head.strip_prefix('<') {
            Some(head) => (true, head),
            None => (at == 0, head.as_str()),
        })
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Document {
    blocks: Vec<Block>,
}

impl Document {
    pub(super) fn push(&mut self, block: Block) {
        self.blocks.push(block);
    }

    pub(super) fn heading(&mut self, level: usize, text: impl Into<String>) {
        self.push(Block::Heading(level, text.into()));
    }

    pub(super) fn paragraph(&mut self, text: impl Into<String>) {
        self.push(Block::Paragraph(text.into()));
    }

    /// Nothing is shown of a table without rows.
    pub(super) fn table(&mut self, table: Table) {
        if !table.is_empty() {
            self.push(Block::Table(table));
        }
    }

    /// Names and pictures.
    pub(super) fn plots(&self) -> impl Iterator<Item = (&str, &str)> {
        self.blocks.iter().filter_map(|block| match block {
            Block::Plot(name, _, svg) => Some((name.as_str(), svg.as_str())),
            _ => None,
        })
    }

    pub(super) fn markdown(&self, plots: &str) -> String {
        let parts = self.blocks.iter().map(|block| match block {
            Block::Heading(level, text) => format!("{} {text}", "#".repeat(*level)),
            Block::Paragraph(text) => text.clone(),
            Block::Code(text) => format!("```sh\n{text}\n```"),
            Block::Table(table) => table.markdown(),
            Block::Plot(name, what, _) => format!("![{what}]({plots}/{name}.svg)"),
        });
        parts.collect::<Vec<_>>().join("\n\n") + "\n"
    }

    pub(super) fn html(&self) -> String {
        let mut body = String::new();
        for block in &self.blocks {
            let part = match block {
                Block::Heading(level, text) => format!("<h{level}>{}</h{level}>", escaped(text)),
                Block::Paragraph(text) => format!("<p>{}</p>", escaped(text)),
                Block::Code(text) => format!("<pre>{}</pre>", escaped(text)),
                Block::Table(table) => table.html(),
                Block::Plot(_, _, svg) => svg.clone(),
            };
            body.push_str(&part);
            body.push('\n');
        }
        let title = self.blocks.iter().find_map(|block| match block {
            Block::Heading(1, text) => Some(escaped(text)),
            _ => None,
        });
        format!(
            "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width\">\n<title>{}</title>\n\
             <style>{STYLE}</style>\n<main>\n{body}</main>\n</html>\n",
            title.unwrap_or_default()
        )
    }
}

const STYLE: &str = "
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 }
main { max-width: 62rem; margin: 0 auto; padding: 1rem }
h2 { margin-top: 3rem; border-bottom: 1px solid #8886 } h3 { margin-top: 2rem }
table { border-collapse: collapse; display: block; overflow-x: auto; margin: 1rem 0 }
th, td { padding: .2rem .7rem; border-bottom: 1px solid #8884; text-align: right }
.l { text-align: left } th { font-weight: 600; white-space: nowrap }
pre { background: #8882; padding: .7rem; overflow-x: auto }
svg { max-width: 100%; height: auto }
";

impl Table {
    fn markdown(&self) -> String {
        let line = |cells: &mut dyn Iterator<Item = String>| {
            format!("| {} |", cells.collect::<Vec<_>>().join(" | "))
        };
        let mut lines = vec![
            line(&mut self.columns().map(|(_, head)| head.to_owned())),
            line(&mut self.columns().map(|(left, _)| if left { "---" } else { "---:" }.to_owned())),
        ];
        for row in &self.rows {
            lines.push(line(&mut row.iter().map(|cell| cell.replace('|', "\\|"))));
        }
        lines.join("\n")
    }

    fn html(&self) -> String {
        let columns: Vec<_> = self.columns().collect();
        let row = |tag: &str, cells: &mut dyn Iterator<Item = &str>| {
            let mut text = String::from("<tr>");
            for (cell, (left, _)) in cells.zip(&columns) {
                let class = if *left { " class=\"l\"" } else { "" };
                // a String takes everything
                let _ = write!(text, "<{tag}{class}>{}</{tag}>", marked(&escaped(cell)));
            }
            text + "</tr>\n"
        };
        let mut text = String::from("<table>\n");
        text.push_str(&row("th", &mut columns.iter().map(|(_, head)| *head)));
        for cells in &self.rows {
            text.push_str(&row("td", &mut cells.iter().map(String::as_str)));
        }
        text + "</table>"
    }
}

/// `**bold**`, the only mark that a cell may have.
fn marked(text: &str) -> String {
    match text.strip_prefix("**").and_then(|text| text.strip_suffix("**")) {
        Some(text) => format!("<b>{text}</b>"),
        None => text.to_owned(),
    }
}

pub(super) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document() -> Document {
        let mut document = Document::default();
        document.heading(1, "a < b");
        let mut table = Table::new(&["name", "number", "<why"]);
        table.row(["x|y", "1", "**met**"]);
        document.table(table);
        document.table(Table::new(&["empty"]));
        document.push(Block::Plot("p".into(), "times".into(), "<svg/>".into()));
        document
    }

    #[test]
    fn markdown_keeps_its_columns() {
        assert_eq!(
            document().markdown("plots"),
            "# a < b\n\n\
             | name | number | why |\n| --- | ---: | --- |\n| x\\|y | 1 | **met** |\n\n\
             ![times](plots/p.svg)\n"
        );
    }

    #[test]
    fn html_is_one_file_and_escapes_what_it_shows() {
        let html = document().html();
        assert!(html.contains("<title>a &lt; b</title>") && html.contains("<svg/>"), "{html}");
        assert!(html.contains("<td class=\"l\"><b>met</b></td>"), "{html}");
        assert!(html.contains("<td>1</td>"), "{html}");
    }
}
