//! [`StoreUrl`]: the URL of a store, split into what is ours and what is the driver's.

use std::fmt;

use leasehold_core::{Error, ErrorKind, Holder, Result};

/// What stands in place of a password.
const HIDDEN: &str = "***";

/// The options that every scheme has.
const COMMON: &[&str] = &["namespace", "app"];

/// A URL whose options are not checked yet.
pub(crate) struct StoreUrl {
    pub(crate) scheme: String,
    /// What follows `scheme:`, without the options.
    rest: String,
    /// Name and value, decoded, and the text as it came.
    options: Vec<(String, String, String)>,
}

impl StoreUrl {
    pub(crate) fn parse(url: &str) -> Result<Self> {
        let (scheme, rest) = url.split_once(':').ok_or_else(|| {
            invalid("a store's url begins with a scheme, e.g. postgres://host/database or memory:")
        })?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let pair = |text: &str| {
            let mut pairs = form_urlencoded::parse(text.as_bytes()).into_owned();
            pairs.next().map(|(name, value)| (name, value, text.to_owned()))
        };
        let options = query.split('&').filter_map(pair).collect();
        Ok(Self { scheme: scheme.to_ascii_lowercase(), rest: rest.to_owned(), options })
    }

    /// What follows `scheme:`, without the options.
    pub(crate) fn rest(&self) -> &str {
        &self.rest
    }

    /// Refuses options that are neither of `ours` nor of the driver's, and those given twice.
    pub(crate) fn check(&self, ours: &[&str], drivers: &[&str]) -> Result<()> {
        for (at, (name, _, _)) in self.options.iter().enumerate() {
            let name = name.as_str();
            let is_ours = COMMON.contains(&name) || ours.contains(&name);
            if !is_ours && !drivers.contains(&name) {
                let known: Vec<_> = [COMMON, ours, drivers].concat();
                let known = known.join(", ");
                let (scheme, name) = (&self.scheme, self.quoted(name));
                return Err(invalid(&format!("{scheme}: has no option {name}; it has {known}")));
            }
            if is_ours && self.options[..at].iter().any(|(earlier, _, _)| earlier == name) {
                return Err(invalid(&format!("the option {name} is given twice")));
            }
        }
        Ok(())
    }

    /// A part of the options as a message may show it: where an @ is among them, they may be the
    /// rest of a password with a question mark.
    fn quoted<'a>(&self, text: &'a str) -> &'a str {
        let is_mistaken = self.options.iter().any(|(_, _, raw)| raw.contains('@'));
        if is_mistaken { HIDDEN } else { text }
    }

    /// The URL for the driver: with its scheme and only its options.
    #[cfg(any(feature = "postgres", feature = "mysql", feature = "redis", feature = "sqlite"))]
    pub(crate) fn for_driver(&self, scheme: &str, drivers: &[&str]) -> String {
        let theirs = self.options.iter().filter(|(name, _, _)| drivers.contains(&name.as_str()));
        let query: Vec<_> = theirs.map(|(_, _, text)| text.as_str()).collect();
        let query = if query.is_empty() { String::new() } else { format!("?{}", query.join("&")) };
        format!("{scheme}:{}{query}", self.rest)
    }

    /// The value of an option.
    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        let option = self.options.iter().find(|(known, _, _)| known == name);
        option.map(|(_, value, _)| value.as_str())
    }

    /// A number, or `true` or `false`.
    #[cfg(any(feature = "postgres", feature = "mysql", feature = "redis"))]
    pub(crate) fn value<T: std::str::FromStr>(&self, name: &str, what: &str) -> Result<Option<T>> {
        let Some(text) = self.text(name) else { return Ok(None) };
        let refused = |_| invalid(&format!("{name}={} is not {what}", self.quoted(text)));
        text.parse().map(Some).map_err(refused)
    }

    /// A time such as `500ms` or `1m 30s`.
    #[cfg(any(feature = "mysql", feature = "redis", feature = "sqlite"))]
    pub(crate) fn duration(&self, name: &str) -> Result<Option<std::time::Duration>> {
        let Some(text) = self.text(name) else { return Ok(None) };
        let refused = |_| {
            let text = self.quoted(text);
            invalid(&format!("{name}={text} is not a time such as 500ms or 15s"))
        };
        humantime::parse_duration(text).map(Some).map_err(refused)
    }

    /// The holder that others are told: this process, under the name of the option `app`.
    pub(crate) fn holder(&self) -> Holder {
        let holder = Holder::this_process();
        match self.text("app") {
            Some(app) => holder.named(app),
            None => holder,
        }
    }
}

impl fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // the rest may hold a password
        f.debug_struct("StoreUrl").field("scheme", &self.scheme).finish_non_exhaustive()
    }
}

pub(crate) fn invalid(detail: &str) -> Error {
    Error::new(ErrorKind::InvalidOptions, detail)
}

/// The URL with `***` in place of a password, for messages and logs.
///
/// Rather too much is hidden than too little: also of a URL that is none, e.g. because its
/// password has a `/` or `?` that ought to be written `%2F` or `%3F`.
///
/// ```
/// assert_eq!(leasehold::redacted("mysql://me:secret@db/app"), "mysql://me:***@db/app");
/// ```
pub fn redacted(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once(':') else { return HIDDEN.to_owned() };
    let (before, query) = match rest.split_once('?') {
        Some((before, query)) => (before, Some(query)),
        None => (rest, None),
    };
    let hidden = |text: &str| {
        let at = text.rfind('@')?;
        let colon = text[..at].find(':')?;
        Some(format!("{}:{HIDDEN}{}", &text[..colon], &text[at..]))
    };
    // an @ among the options: a password with a question mark, or an option with an @
    if let (Some(query), Some(colon)) = (query, before.find(':'))
        && let Some(at) = query.rfind('@')
        && before[colon..].len() > 1
    {
        let named = query.split('&').any(speaks_of_a_password);
        let host = if named { "" } else { &query[at..] };
        return format!("{scheme}:{}:{HIDDEN}{host}", &before[..colon]);
    }
    let shown = hidden(before);
    let shown = shown.unwrap_or_else(|| before.to_owned());
    match query {
        Some(query) => format!("{scheme}:{shown}?{}", secretless(query)),
        None => format!("{scheme}:{shown}"),
    }
}

/// The options with hidden values where their names speak of a password.
fn secretless(query: &str) -> String {
    let pair = |pair: &str| match pair.split_once('=') {
        Some((name, _)) if speaks_of_a_password(pair) => format!("{name}={HIDDEN}"),
        _ => pair.to_owned(),
    };
    query.split('&').map(pair).collect::<Vec<_>>().join("&")
}

/// Also where it is written `p%61ssword`, which a driver reads all the same, and where another `?` or
/// `=` before it makes it a part of the value.
fn speaks_of_a_password(pair: &str) -> bool {
    let speaks = |text: &str| text.to_ascii_lowercase().contains("pass");
    let mut pairs = form_urlencoded::parse(pair.as_bytes());
    pairs.any(|(name, value)| speaks(&name) || (value.contains('=') && speaks(&value)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_are_hidden() {
        for (url, shown) in [
            ("postgres://me:s3cret@db:5432/app", "postgres://me:***@db:5432/app"),
            ("postgres://me:s3/cr@et@db/app?sslmode=off", "postgres://me:***@db/app?sslmode=off"),
            ("postgres://me:s3?cret@db/app", "postgres://me:***@db/app"),
            ("postgres://me:s3@?cret@db/app", "postgres://me:***@db/app"),
            ("postgres://[::1]:1?password=s3@cret", "postgres://[:***"),
            ("postgres://db/?=?password=s3cret", "postgres://db/?=***"),
            ("postgres://db/?app=x?p%61ssword=s3cret", "postgres://db/?app=***"),
            ("postgres://db?p%61ssword=s3cret", "postgres://db?p%61ssword=***"),
            ("redis://:s3cret@db/0", "redis://:***@db/0"),
            ("postgres://me@db/app", "postgres://me@db/app"),
            ("postgres://db:5432/app?app=x", "postgres://db:5432/app?app=x"),
            ("postgres://db/a?user=me&password=s3cret", "postgres://db/a?user=me&password=***"),
            (
                "redis-sentinel://h?sentinelPassword=s3cret",
                "redis-sentinel://h?sentinelPassword=***",
            ),
            ("sqlite:/var/lib/a.db", "sqlite:/var/lib/a.db"),
            ("memory:", "memory:"),
            ("s3cret", "***"),
        ] {
            assert_eq!(redacted(url), shown);
        }
        let debug = format!("{:?}", StoreUrl::parse("postgres://me:s3cret@db/app").unwrap());
        assert!(!debug.contains("s3cret"), "{debug}");
    }

    #[test]
    fn options_are_split_and_checked() {
        let url = "PG://me@db/app?namespace=a%26b&sslmode=off&sslmode=on&app=x";
        let url = StoreUrl::parse(url).unwrap();
        assert_eq!((url.scheme.as_str(), url.rest()), ("pg", "//me@db/app"));
        assert_eq!(url.text("namespace"), Some("a&b"));
        assert_eq!(url.holder().app, "x");
        url.check(&[], &["sslmode"]).unwrap();
        let error = url.check(&["table"], &[]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOptions);
        let error = error.to_string();
        assert!(error.contains("no option sslmode"), "{error}");
        assert!(error.contains("namespace, app, table"), "{error}");
        let mistaken = StoreUrl::parse("pg://me:s3?cret@db").unwrap().check(&[], &[]).unwrap_err();
        assert!(!mistaken.to_string().contains("cret"), "{mistaken}");
        let twice = StoreUrl::parse("a:?app=x&app=y").unwrap().check(&[], &[]).unwrap_err();
        assert!(twice.to_string().contains("twice"), "{twice}");
        assert!(StoreUrl::parse("no-scheme").is_err());
    }

    #[cfg(any(feature = "postgres", feature = "mysql", feature = "redis"))]
    #[test]
    fn the_driver_gets_what_is_its_own() {
        let url = StoreUrl::parse("mariadb://me:p%40@db/app?app=x&pool_max=3&n=7").unwrap();
        assert_eq!(url.for_driver("mysql", &["pool_max"]), "mysql://me:p%40@db/app?pool_max=3");
        assert_eq!(url.for_driver("mysql", &[]), "mysql://me:p%40@db/app");
        assert_eq!(url.value::<u32>("n", "a number").unwrap(), Some(7));
        let error = url.value::<u32>("app", "a number").unwrap_err();
        assert!(error.to_string().contains("app=x is not a number"), "{error}");
    }
}
