//! Reads what is held: one key by its name, lists by SCAN.

use std::collections::{BTreeMap, HashMap};

use fred::types::config::Server;
use fred::types::{ClusterHash, Value};
use leasehold_core::{
    Error, ErrorKind, FencingToken, HeldName, Holder, Holding, HoldingQuery, Key, Kind, NameQuery,
    Result,
};

use super::found::{Found, Seen};
use crate::conn::{Conn, Words};
use crate::error::strange;
use crate::keys::Place;
use crate::locks::{array, number};
use crate::script::{DISPLACE, LOOK};
use crate::wake::TAKEN;

/// Keys that the server looks at in one step of a scan.
const PAGE: i64 = 1_000;
/// Keys that one script reads.
const CHUNK: usize = 100;
/// Holders that are asked for at once.
const HOLDERS: usize = 500;

/// By kind and name: a scan may show a key twice.
type Listed = BTreeMap<(Kind, HeldName), Found>;

impl Conn {
    pub(super) async fn holdings(&self, query: &HoldingQuery) -> Result<Vec<Holding>> {
        let mut listed = Listed::new();
        match &query.names {
            NameQuery::Key(key) => {
                let kinds = Kind::ALL.into_iter().filter(|kind| query.wants(*kind));
                let wanted = kinds.map(|kind| (kind, key.clone())).collect();
                self.look(wanted, query, &mut listed).await?;
            }
            NameQuery::Prefix(prefix) => {
                for node in self.nodes()? {
                    self.scan(node, prefix, query, &mut listed).await?;
                }
            }
        }
        let mut found: Vec<Found> = listed.into_values().collect();
        self.name_holders(&mut found).await?;
        Ok(query.arrange(found.into_iter().map(|found| found.holding).collect()))
    }

    /// Takes it away, and tells those who wait and who had it.
    pub(super) async fn displace(&self, kind: Kind, key: &Key) -> Result<Option<Holding>> {
        let answer = self.take_away(kind, key, None).await?;
        let seen = read(&answer, 1)?;
        let Some(found) = seen.into_iter().next().flatten() else { return Ok(None) };
        let mut found: Vec<Found> = found.read(kind, key.clone()).into_iter().collect();
        // it has happened: who that was may stay unknown
        if let Err(error) = self.name_holders(&mut found).await {
            tracing::debug!(%error, "the displaced holder is not known");
        }
        Ok(found.pop().map(|found| found.holding))
    }

    /// Frees a lock that is held under this token; says whether it was.
    pub(super) async fn release_held(
        &self,
        kind: Kind,
        key: &Key,
        token: FencingToken,
    ) -> Result<bool> {
        let answer = self.take_away(kind, key, Some(token)).await?;
        Ok(read(&answer, 1)?.iter().any(Option::is_some))
    }

    async fn take_away(&self, kind: Kind, key: &Key, token: Option<FencingToken>) -> Result<Value> {
        let place = self.keys.place(kind, key);
        let news = match kind {
            Kind::Dedupe => String::new(),
            Kind::Lock | Kind::Lease | Kind::Claim => format!("{TAKEN}{}", place.wake),
        };
        let token = token.map(|token| token.to_string()).unwrap_or_default();
        let words = || Words {
            keys: vec![place.name.as_str().into()],
            args: vec![
                self.keys.publish(),
                self.keys.channel_word(&place.tag),
                news.as_str().into(),
                token.as_str().into(),
            ],
        };
        self.call(&DISPLACE, place.wake, words).await
    }

    async fn scan(
        &self,
        node: Option<Server>,
        prefix: &str,
        query: &HoldingQuery,
        listed: &mut Listed,
    ) -> Result<()> {
        let kind = match query.kinds.as_slice() {
            [] => return Ok(()),
            [kind] => Some(*kind),
            _ => None,
        };
        let pattern = self.keys.pattern(kind, prefix);
        let mut cursor = Value::from_static_str("0");
        loop {
            let words = vec![
                cursor,
                Value::from_static_str("MATCH"),
                pattern.as_str().into(),
                Value::from_static_str("COUNT"),
                Value::Integer(PAGE),
            ];
            let page = self.ask_node(node.clone(), "SCAN", words).await.map_err(unlisted)?;
            let [next, names] = array(&page)? else { return Err(strange(&page)) };
            // a name that is no text is none of ours
            let names = array(names)?.iter().filter_map(Value::as_str);
            let wanted = names.filter_map(|name| {
                let (kind, key) = self.keys.parsed(&name)?;
                let asked = query.wants(kind) && query.matches(&key);
                (asked && self.keys.place(kind, &key).name == *name).then_some((kind, key))
            });
            self.look(wanted.collect(), query, listed).await?;
            if number(Some(next)) == Some(0) {
                return Ok(());
            }
            cursor = next.clone();
        }
    }

    /// Adds those of `wanted` that are held, and keeps as many as are asked for.
    async fn look(
        &self,
        wanted: Vec<(Kind, Key)>,
        query: &HoldingQuery,
        listed: &mut Listed,
    ) -> Result<()> {
        let wanted: Vec<(Kind, Key, Place)> = wanted
            .into_iter()
            .map(|(kind, key)| {
                let place = self.keys.place(kind, &key);
                (kind, key, place)
            })
            .collect();
        let mut groups: HashMap<&str, Vec<&(Kind, Key, Place)>> = HashMap::new();
        for one in &wanted {
            let slot = if self.keys.clustered() { one.2.tag.as_str() } else { "" };
            groups.entry(slot).or_default().push(one);
        }
        let calls = groups.values().flat_map(|group| group.chunks(CHUNK)).map(|chunk| async move {
            let words = || Words {
                keys: chunk.iter().map(|(_, _, place)| place.name.as_str().into()).collect(),
                args: Vec::new(),
            };
            let wake = chunk.first().map_or(0, |(_, _, place)| place.wake);
            self.call(&LOOK, wake, words).await.map(|answer| (chunk, answer))
        });
        for answered in futures_util::future::join_all(calls).await {
            let (chunk, answer) = answered?;
            for ((kind, key, _), seen) in chunk.iter().zip(read(&answer, chunk.len())?) {
                let Some(found) = seen.and_then(|seen| seen.read(*kind, key.clone())) else {
                    continue;
                };
                if found.holding.done && !query.done {
                    continue;
                }
                listed.insert((*kind, found.holding.name.clone()), found);
                if listed.len() > query.limit {
                    listed.pop_last();
                }
            }
        }
        Ok(())
    }

    /// Puts the holders' names to what they hold; an instance that is not known stays a number.
    async fn name_holders(&self, found: &mut [Found]) -> Result<()> {
        let mut holders: BTreeMap<u32, Option<Holder>> =
            found.iter().filter_map(|found| found.instance).map(|one| (one, None)).collect();
        let instances: Vec<u32> = holders.keys().copied().collect();
        for chunk in instances.chunks(HOLDERS) {
            let words = chunk.iter().map(|instance| self.keys.holder(*instance)).collect();
            let answer = self.command(0, "MGET", ClusterHash::FirstKey, words).await?;
            for (instance, label) in chunk.iter().zip(array(&answer)?) {
                let holder = label.as_str().and_then(|label| label.parse().ok());
                holders.insert(*instance, holder);
            }
        }
        for Found { holding, instance } in found {
            let Some(instance) = *instance else { continue };
            match holders.get(&instance) {
                Some(Some(holder)) => holding.holder = Some(holder.clone()),
                _ => holding.session = Some(format!("instance {instance:08x}")),
            }
        }
        Ok(())
    }
}

/// A user needs one more permission for lists.
fn unlisted(error: Error) -> Error {
    if error.kind() != ErrorKind::Backend {
        return error;
    }
    let detail = "lists need SCAN: let the user run it (+scan), or ask by key";
    Error::new(ErrorKind::Backend, detail).with_source(error)
}

/// What a script has seen of so many keys.
fn read(answer: &Value, count: usize) -> Result<Vec<Option<Seen<'_>>>> {
    let parts = array(answer)?;
    let (Some(now), true) = (number(parts.first()), parts.len() == 1 + 2 * count) else {
        return Err(strange(answer));
    };
    let pairs = parts[1..].chunks(2);
    Ok(pairs
        .map(|pair| {
            let value = match &pair[0] {
                Value::String(text) => &**text,
                // what is no text is none of ours, but held
                Value::Bytes(_) => "?",
                _ => "",
            };
            let left = pair[1].as_i64().unwrap_or(-1);
            (left != -2).then_some(Seen { value, left, now })
        })
        .collect())
}
