//! [`Holder`]: the process behind a handle, as others see it.

use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::OnceLock;

/// The longest app and host that are told, in bytes.
const NAME_BYTES: usize = 64;

/// The process behind a handle: what a store keeps of it, so that others can be told who holds
/// something.
///
/// Its text is `app@host:pid#instance`, e.g. `worker@web-2:4711#9f31c0aa`; parsing gives back what
/// was written. It is a label for people: nothing is decided by it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Holder {
    /// The program, or the name that the service gave.
    pub app: String,
    /// The name of its machine.
    pub host: String,
    /// The number of its process there.
    pub pid: u32,
    /// Random for each handle: tells two handles, and two processes of the same number, apart.
    pub instance: u32,
}

impl Holder {
    /// This process, under the name of its program, as a new instance.
    pub fn this_process() -> Self {
        let program = std::env::args_os().next();
        let app = program.as_deref().and_then(|path| Path::new(path).file_name());
        let app = app.map_or_else(|| "unknown".into(), |name| name.to_string_lossy());
        Self {
            app: plain(&app),
            host: host().to_owned(),
            pid: std::process::id(),
            instance: rand::random(),
        }
    }

    /// Under this name: control characters are replaced, and what is longer than 64 bytes is cut.
    #[must_use]
    pub fn named(self, app: &str) -> Self {
        Self { app: plain(app), ..self }
    }

    /// The text in at most `bytes` bytes: the name of the app is cut first, then the start of the
    /// host's. `bytes` below 30 count as 30.
    pub fn label(&self, bytes: usize) -> String {
        let full = self.to_string();
        let mut excess = full.len().saturating_sub(bytes.max(30));
        if excess == 0 {
            return full;
        }
        let app = cut(&self.app, self.app.len().saturating_sub(excess).max(4)).to_owned();
        excess = excess.saturating_sub(self.app.len() - app.len());
        let mut from = excess.min(self.host.len());
        while !self.host.is_char_boundary(from) {
            from += 1;
        }
        Self { app, host: self.host[from..].to_owned(), ..self.clone() }.to_string()
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}:{}#{:08x}", self.app, self.host, self.pid, self.instance)
    }
}

impl FromStr for Holder {
    type Err = ();

    /// Reads its text back.
    fn from_str(text: &str) -> Result<Self, ()> {
        let (text, instance) = text.rsplit_once('#').ok_or(())?;
        let (text, pid) = text.rsplit_once(':').ok_or(())?;
        let (app, host) = text.rsplit_once('@').ok_or(())?;
        Ok(Self {
            app: plain(app),
            host: plain(host),
            pid: pid.parse().map_err(drop)?,
            instance: u32::from_str_radix(instance, 16).map_err(drop)?,
        })
    }
}

/// The name of this machine; asked for once.
fn host() -> &'static str {
    static HOST: OnceLock<String> = OnceLock::new();
    HOST.get_or_init(|| {
        let host = plain(&gethostname::gethostname().to_string_lossy());
        // it ends the name of the app in the text
        host.replace('@', "-")
    })
}

/// Printable, of bounded length, and never empty.
fn plain(name: &str) -> String {
    let name: String = name.chars().map(|c| if c.is_control() { '-' } else { c }).collect();
    match cut(&name, NAME_BYTES) {
        "" => "unknown".to_owned(),
        name => name.to_owned(),
    }
}

fn cut(text: &str, bytes: usize) -> &str {
    let mut end = bytes.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_reads_back() {
        let ours = Holder::this_process();
        assert_eq!(ours.to_string().parse(), Ok(ours.clone()));
        let odd = ours.named("a@b:c#d é\n");
        assert_eq!(odd.app, "a@b:c#d é-");
        assert_eq!(odd.to_string().parse(), Ok(odd));
        for text in ["", "app", "app@host", "app@host:x#1", "app@host:1", "app@host:1#zz"] {
            assert_eq!(text.parse::<Holder>(), Err(()), "{text}");
        }
    }

    #[test]
    fn a_label_is_cut_where_it_must_be() {
        let long = Holder {
            app: "é".repeat(32),
            host: format!("{}-7d9f8b6c5d-x2x9k", "h".repeat(40)),
            pid: u32::MAX,
            instance: 7,
        };
        for bytes in 0..200 {
            let label = long.label(bytes);
            assert!(label.len() <= bytes.max(30), "{label} in {bytes}");
            assert!(label.ends_with(":4294967295#00000007"), "{label}");
        }
        let label = long.label(63);
        assert!(label.contains("-7d9f8b6c5d-x2x9k:"), "{label}");
        assert_eq!(long.label(200), long.to_string());
        assert!(Holder::this_process().named(&"x".repeat(500)).app.len() <= NAME_BYTES);
    }
}
