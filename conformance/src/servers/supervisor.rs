use std::{
    ffi::OsString,
    fs,
    io::{BufRead as _, BufReader, Write as _},
    os::unix::{ffi::OsStrExt as _, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use super::Error;

const SCRIPT: &str = include_str!("supervisor.sh");

/// A shell that ends the server and removes its folder as soon as this value, or
/// this process, is gone.
///
/// The kernel's own means to that (`PR_SET_PDEATHSIG`) fires when the *thread* that
/// started the server ends, and a test's thread ends early.
#[derive(Debug)]
pub(super) struct Supervisor {
    folder: PathBuf,
    shell: Child,
    /// Taken by drop: closing it is the order to finish.
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Supervisor {
    /// Takes over an existing folder.
    pub(super) fn new(folder: &Path) -> Result<Self, Error> {
        let mut shell = Command::new("sh")
            .args(["-c", SCRIPT, "supervisor"])
            .arg(folder)
            // What the test was started with (a library path by cargo, a PGPORT by
            // somebody's profile) is not the server's business.
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("LC_ALL", "C")
            .current_dir(folder)
            // Ctrl-C goes to the foreground group: the shell must live to clean up.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(Error::io("start a shell"))?;
        let orders = shell.stdin.take();
        let answers = shell.stdout.take();
        Ok(Self {
            folder: folder.to_owned(),
            shell,
            orders,
            answers: BufReader::new(answers.expect("its output was asked to be piped")),
        })
    }

    /// Starts the server and returns its process id.
    pub(super) fn start(&mut self, command: &[OsString]) -> Result<u32, Error> {
        let path = self.folder.join("command");
        fs::write(&path, script(command))
            .map_err(Error::io(format!("write {}", path.display())))?;
        let answer = self.order("start")?;
        answer.parse().map_err(|_| Error::Command(format!("the supervisor answered {answer:?}")))
    }

    /// Takes note of a server's end, so that its process id becomes free. To be
    /// called when it has ended: the supervisor can do nothing else meanwhile.
    pub(super) fn wait(&mut self) -> Result<(), Error> {
        self.order("wait").map(drop)
    }

    fn order(&mut self, order: &str) -> Result<String, Error> {
        let mut answer = String::new();
        self.orders
            .as_mut()
            .expect("only drop takes it")
            .write_all(format!("{order}\n").as_bytes())
            .and_then(|()| self.answers.read_line(&mut answer))
            .map_err(Error::io("talk to the supervisor"))?;
        if answer.is_empty() {
            return Err(Error::Command("the supervisor of the server ended".into()));
        }
        Ok(answer.trim_end().to_owned())
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        drop(self.orders.take());
        // It ends when all is gone. Should waiting fail, nothing is left to do.
        let _ = self.shell.wait();
    }
}

/// A shell script that becomes the command: the process id stays the same.
fn script(command: &[OsString]) -> Vec<u8> {
    let mut script = b"exec".to_vec();
    for word in command {
        script.extend_from_slice(b" '");
        for byte in word.as_bytes() {
            match byte {
                b'\'' => script.extend_from_slice(br"'\''"),
                _ => script.push(*byte),
            }
        }
        script.push(b'\'');
    }
    script.push(b'\n');
    script
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_quoted() {
        let command = ["a b", "it's", "$HOME"].map(OsString::from);
        assert_eq!(
            script(&command),
            br"exec 'a b' 'it'\''s' '$HOME'
"
        );
    }
}
