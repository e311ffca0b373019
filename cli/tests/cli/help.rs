//! Help, man pages and completions.

use std::process::{Command, Stdio};

use super::support::{ended, leasehold};

const COMMANDS: [&str; 13] = [
    "run",
    "list",
    "show",
    "watch",
    "release",
    "dedupe",
    "migrate",
    "housekeep",
    "doctor",
    "verify",
    "bench",
    "completions",
    "man",
];

#[test]
fn every_subcommand_explains_itself() {
    let all = ended(&mut leasehold(&["--help"])).code_is(0);
    let listed: Vec<&str> = all.out.lines().filter_map(|line| line.strip_prefix("  ")).collect();
    let listed: Vec<&str> =
        listed.iter().filter_map(|line| line.split_whitespace().next()).collect();
    for command in COMMANDS {
        assert!(listed.contains(&command), "{command} is not in {}", all.out);
        let long = ended(&mut leasehold(&[command, "--help"])).code_is(0);
        let short = ended(&mut leasehold(&[command, "-h"])).code_is(0);
        for text in [&long.out, &short.out] {
            let first = text.lines().next().unwrap_or_default();
            assert!(first.len() > 20 && !first.ends_with('.'), "{command}: {first:?}");
            assert!(text.contains(&format!("Usage: leasehold {command}")), "{text}");
            assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
        }
        // no option without a word of what it is for
        let lines: Vec<&str> = long.out.lines().collect();
        for (at, line) in lines.iter().enumerate() {
            let is_option = line.starts_with("  -") || line.starts_with("      --");
            if is_option {
                let next = lines.get(at + 1).copied().unwrap_or_default();
                let explains = next.starts_with("          ") || line.trim().contains("  ");
                assert!(explains, "{command}: {line:?} is not explained");
            }
        }
    }
    ended(&mut leasehold(&["--version"])).code_is(0);
    ended(&mut leasehold(&[])).code_is(2);
    ended(&mut leasehold(&["no-such-command"])).code_is(2);
}

#[test]
fn completions_are_of_the_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = ended(&mut leasehold(&["completions", shell])).code_is(0).out;
        assert!(script.contains("housekeep") && script.contains("busy-code"), "{shell}");
        if shell == "bash" {
            let checked = Command::new("bash").args(["-n", "-c", &script]).status();
            assert!(checked.expect("bash is there").success());
        }
        assert!(!script.contains("__start"), "{shell} shows what is internal");
    }
    ended(&mut leasehold(&["completions", "cmd"])).code_is(2);
}

#[test]
fn man_pages_are_of_all_subcommands() {
    let page = ended(&mut leasehold(&["man"])).code_is(0).out;
    assert!(page.contains(".TH leasehold") && page.contains("LEASEHOLD_URL"), "{page}");
    let folder = tempfile::tempdir().expect("a folder");
    let into = folder.path().to_str().expect("UTF-8");
    ended(&mut leasehold(&["man", "--into", into])).code_is(0);
    for command in COMMANDS {
        let path = folder.path().join(format!("leasehold-{command}.1"));
        let page = std::fs::read_to_string(&path).expect("the page is there");
        assert!(page.contains(".SH OPTIONS"), "{path:?}");
    }
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let mut command = leasehold(&["man"]);
    let mut child = command.stdout(Stdio::piped()).spawn().expect("it starts");
    drop(child.stdout.take());
    assert!(child.wait().expect("it ends").success());
}
