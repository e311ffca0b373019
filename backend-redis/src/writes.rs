//! What is known about the commands that a claim may queue.

use fred::types::Value;
use leasehold_core::{Error, ErrorKind, Result};

/// Words of one command; more do not fit on the stack of a script.
const MAX_WORDS: usize = 5_000;

/// A queued write.
#[derive(Clone, Debug)]
pub(crate) struct Write {
    pub(crate) spec: Spec,
    /// The command and its arguments.
    pub(crate) words: Vec<Value>,
}

/// What a command does to its keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spec {
    /// The type that a key has if it exists; `any` (it stays), `none` (it is deleted),
    /// `replaced` (by a string), or `unknown`.
    pub(crate) kind: &'static str,
    keys: KeysOf,
    /// Arguments at least.
    least: usize,
}

#[derive(Clone, Copy, Debug)]
enum KeysOf {
    None,
    First,
    FirstTwo,
    All,
    /// Every other one.
    Pairs,
}

impl Write {
    /// Checks what can be known without the server.
    pub(crate) fn new(name: &str, args: Vec<Value>) -> Result<Self> {
        let name = name.to_ascii_uppercase();
        let refused = |detail: String| Err(Error::new(ErrorKind::InvalidOptions, detail));
        let Some(spec) = spec(&name) else {
            let detail = format!("{name} is not a write that a claim can queue");
            return Err(Error::new(ErrorKind::Unsupported, detail));
        };
        if args.len() < spec.least {
            return refused(format!("{name} has at least {} arguments", spec.least));
        }
        if args.len() >= MAX_WORDS {
            return refused(format!("{name} with {} arguments: split it", args.len()));
        }
        if let Some(bad) = args.iter().find(|arg| {
            matches!(arg, Value::Null | Value::Queued | Value::Map(_) | Value::Array(_))
        }) {
            return refused(format!("{bad:?} is not an argument"));
        }
        let mut words = Vec::with_capacity(1 + args.len());
        words.push(name.into());
        words.extend(args);
        Ok(Self { spec, words })
    }

    /// Its keys.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &Value> {
        let args = &self.words[1..];
        let (count, step) = match self.spec.keys {
            KeysOf::None => (0, 1),
            KeysOf::First => (1, 1),
            KeysOf::FirstTwo => (2, 1),
            KeysOf::All => (args.len(), 1),
            KeysOf::Pairs => (args.len(), 2),
        };
        args.iter().take(count).step_by(step)
    }

    /// The number of the first word that is a key, counted from the command; 0 without.
    pub(crate) fn first_key(&self) -> i64 {
        i64::from(!matches!(self.spec.keys, KeysOf::None))
    }

    /// Whether it touches a key.
    pub(crate) fn touches(&self, key: &[u8]) -> bool {
        self.keys().any(|word| bytes(word) == key)
    }
}

/// Whether a command writes, so that it cannot go straight through.
pub(crate) fn is_write(name: &str) -> bool {
    spec(&name.to_ascii_uppercase()).is_some()
}

/// A word as the server sees it.
pub(crate) fn bytes(word: &Value) -> Vec<u8> {
    match word {
        Value::Bytes(bytes) => bytes.to_vec(),
        Value::String(text) => text.as_bytes().to_vec(),
        other => other.as_string().unwrap_or_default().into_bytes(),
    }
}

fn spec(name: &str) -> Option<Spec> {
    use KeysOf::{All, First, FirstTwo, None as NoKey, Pairs};
    let (kind, keys, least) = match name {
        "SET" => ("replaced", First, 2),
        "SETNX" | "GETSET" | "APPEND" | "INCRBY" | "DECRBY" | "INCRBYFLOAT" => ("string", First, 2),
        "INCR" | "DECR" | "GETDEL" | "GETEX" | "PFADD" => ("string", First, 1),
        "SETEX" | "PSETEX" => ("replaced", First, 3),
        "SETRANGE" | "SETBIT" => ("string", First, 3),
        "MSET" => ("unknown", Pairs, 2),
        "HSET" | "HSETNX" | "HINCRBY" | "HINCRBYFLOAT" | "HMSET" => ("hash", First, 3),
        "HDEL" => ("hash", First, 2),
        "LPUSH" | "RPUSH" | "LPUSHX" | "RPUSHX" => ("list", First, 2),
        "LPOP" | "RPOP" => ("list", First, 1),
        "LREM" | "LTRIM" | "LSET" => ("list", First, 3),
        "LINSERT" => ("list", First, 4),
        "SADD" | "SREM" => ("set", First, 2),
        "SPOP" => ("set", First, 1),
        "SMOVE" => ("unknown", FirstTwo, 3),
        "ZADD" | "ZINCRBY" | "ZREMRANGEBYSCORE" | "ZREMRANGEBYRANK" | "ZREMRANGEBYLEX" => {
            ("zset", First, 3)
        }
        "ZREM" => ("zset", First, 2),
        "ZPOPMIN" | "ZPOPMAX" => ("zset", First, 1),
        "XADD" => ("stream", First, 4),
        "XDEL" => ("stream", First, 2),
        "XTRIM" | "XACK" => ("stream", First, 3),
        "GEOADD" => ("zset", First, 4),
        "DEL" | "UNLINK" => ("none", All, 1),
        "EXPIRE" | "PEXPIRE" | "EXPIREAT" | "PEXPIREAT" => ("any", First, 2),
        "PERSIST" => ("any", First, 1),
        "RENAME" | "RENAMENX" | "COPY" => ("unknown", FirstTwo, 2),
        "PUBLISH" | "SPUBLISH" => ("any", NoKey, 2),
        _ => return None,
    };
    Some(Spec { kind, keys, least })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(name: &str, args: &[&str]) -> Vec<String> {
        let args = args.iter().map(|arg| Value::from(*arg)).collect();
        let write = Write::new(name, args).unwrap();
        write.keys().map(|key| key.as_string().unwrap()).collect()
    }

    #[test]
    fn the_keys_of_a_write_are_known() {
        assert_eq!(keys("set", &["a", "b"]), ["a"]);
        assert_eq!(keys("del", &["a", "b"]), ["a", "b"]);
        assert_eq!(keys("mset", &["a", "1", "b", "2"]), ["a", "b"]);
        assert_eq!(keys("rename", &["a", "b"]), ["a", "b"]);
        assert!(keys("publish", &["a", "b"]).is_empty());
    }

    #[test]
    fn what_cannot_run_is_refused_when_it_is_queued() {
        for name in ["BLPOP", "SELECT", "FLUSHALL", "EVAL", "MULTI", "GET"] {
            let error = Write::new(name, vec!["a".into(), 1.into()]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{name}");
        }
        let short = Write::new("HSET", vec!["a".into(), "b".into()]).unwrap_err();
        assert_eq!(short.kind(), ErrorKind::InvalidOptions);
        assert!(Write::new("SET", vec!["a".into(), Value::Null]).is_err());
    }
}
