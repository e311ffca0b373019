//! `docs/cases.md` names the tests of each reported case as they are; and it is complete.
//!
//! A test says which case it covers by the case's number, in its documentation or in the table of
//! cases. `LEASEHOLD_BLESS=1 cargo test -p leasehold-conformance --test cases_page` writes the page's
//! last column anew.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Lines between a case's number and the name of its test.
const NEAR: usize = 12;

#[test]
fn the_page_names_the_tests_of_every_case() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let page = root.join("docs/cases.md");
    let text = fs::read_to_string(&page).expect("the page is there");
    let tests = tests_of(&root);
    let mut listed = BTreeSet::new();
    let line = |line: &str| match row(line) {
        Some((number, title)) => {
            listed.insert(number.to_owned());
            let covered = tests.get(number).map(|tests| {
                let tests: Vec<_> = tests.iter().map(|test| format!("`{test}`")).collect();
                tests.join(", ")
            });
            let covered = covered.unwrap_or_else(|| "**no test**".to_owned());
            format!("| {number} | {title} | {covered} |")
        }
        None => line.to_owned(),
    };
    let fresh: Vec<_> = text.lines().map(line).collect();
    let fresh = fresh.join("\n") + "\n";
    if std::env::var_os("LEASEHOLD_BLESS").is_some() {
        fs::write(&page, &fresh).expect("the page can be written");
    } else {
        assert!(text == fresh, "docs/cases.md is not up to date: see how to write it anew above");
    }
    assert!(!fresh.contains("**no test**"), "a case has no test:\n{fresh}");
    let unknown: Vec<_> = tests.keys().filter(|number| !listed.contains(*number)).collect();
    assert!(unknown.is_empty(), "the page has no line for {unknown:?}");
}

/// The number and the title of a line of the table.
fn row(line: &str) -> Option<(&str, &str)> {
    let mut cells = line.strip_prefix("| ")?.splitn(3, " | ");
    let (number, title) = (cells.next()?, cells.next()?);
    (numbers(number) == [number]).then_some((number, title))
}

/// The tests that name each case.
fn tests_of(root: &Path) -> BTreeMap<String, BTreeSet<String>> {
    let mut files = Vec::new();
    for folder in [
        "core",
        "conformance",
        "backend-postgres",
        "backend-mysql",
        "backend-redis",
        "backend-sqlite",
        "leasehold",
        "cli",
    ] {
        for part in ["src", "tests"] {
            collect(&root.join(folder).join(part), &mut files);
        }
    }
    let mut tests = BTreeMap::<_, BTreeSet<_>>::new();
    for file in files {
        let text = fs::read_to_string(&file).expect("a source can be read");
        let path = file.strip_prefix(root).unwrap_or(&file).to_string_lossy().into_owned();
        let lines: Vec<_> = text.lines().collect();
        for (at, line) in lines.iter().enumerate() {
            for number in numbers(line) {
                if let Some(test) = name_near(&path, &lines[at..]) {
                    tests.entry(number.to_owned()).or_default().insert(test);
                }
            }
        }
    }
    tests
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|ext| ext == "rs") {
            files.push(path);
        }
    }
}

/// The numbers of cases in a line: a `B` and two or three digits.
fn numbers(line: &str) -> Vec<&str> {
    let words = line.split(|c: char| !c.is_ascii_alphanumeric());
    let is_number = |word: &&str| {
        word.strip_prefix('B').is_some_and(|digits| {
            (2..=3).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_digit())
        })
    };
    words.filter(is_number).collect()
}

/// What a test is called whose documentation (or line of the table) these lines begin with.
fn name_near(path: &str, lines: &[&str]) -> Option<String> {
    let folder = path.split('/').next()?.trim_start_matches("backend-");
    let file = path.rsplit('/').next()?.trim_end_matches(".rs");
    if path.contains("/src/cases/") {
        let (name, _) = lines.first()?.trim().split_once(" = \"")?;
        let name = name.split(['(', ' ']).next()?;
        return Some(format!("suite {file}::{name}"));
    }
    let function = lines.iter().take(NEAR).find_map(|line| {
        let (_, after) = line.split_once("fn ")?;
        line.trim_start().starts_with(['f', 'a', 'p']).then_some(after)
    })?;
    let name = function.split(['(', '<']).next()?;
    // what is said beside the code of a backend is no test
    let is_test = |line: &str| line.contains("#[test]") || line.contains("#[tokio::test");
    let mut near = lines.iter().take_while(|line| !line.contains("fn "));
    let is_test = path.contains("/tests/") || near.any(|line| is_test(line));
    is_test.then(|| format!("{folder} {file}::{name}"))
}
