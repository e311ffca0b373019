//! Dedupe: entries with a ttl.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use fred::types::Value;
use leasehold_core::backend::{Admit, AdmitAnswer, DedupeDriver, Owner};
use leasehold_core::{Error, ErrorKind, FencingToken, Key, Result};

use crate::conn::{Conn, NAME, Words};
use crate::error::{is_answer, mapped, strange};
use crate::keys::{KEEP_LAST, KEEP_MARK, Kind, Place, millis};
use crate::locks::{array, number};
use crate::script::{ADMIT, SETTLE};

/// Keys that one script admits.
const CHUNK: usize = 100;

/// The statements of dedupe.
#[derive(Debug)]
pub(crate) struct Entries {
    conn: Arc<Conn>,
}

/// What a key is to somebody who asks for it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Entry {
    Answer(AdmitAnswer),
    /// An open claim has seen it first.
    Reserved {
        since: SystemTime,
    },
}

/// One question of the script.
#[derive(Debug)]
pub(crate) struct Question {
    pub(crate) place: Place,
    pub(crate) owner: Owner,
    pub(crate) in_progress: Option<Duration>,
    pub(crate) retain: Duration,
    pub(crate) by_claim: bool,
}

impl Entries {
    pub(crate) fn new(conn: Arc<Conn>) -> Self {
        Self { conn }
    }

    async fn settle(&self, key: &Key, owner: Owner, retain: Option<Duration>) -> Result<bool> {
        let place = self.conn.keys.place(Kind::Dedupe, key);
        self.conn.settle(&place, owner, retain).await
    }
}

impl Conn {
    /// Admits keys that one script may touch.
    async fn admit_chunk(&self, questions: &[&Question]) -> Result<Vec<Entry>> {
        let words = || {
            let mut keys = Vec::with_capacity(3 * questions.len());
            let mut args = vec![millis(KEEP_LAST)];
            for question in questions {
                let place = &question.place;
                keys.push(Value::from(place.name.as_str()));
                keys.push(self.keys.last(Kind::Dedupe, &place.tag));
                keys.push(self.keys.mark(&place.tag, question.owner));
                args.push(self.keys.owner(question.owner).into());
                args.push(question.in_progress.map_or(Value::Integer(0), millis));
                args.push(millis(question.retain));
                args.push(Value::from_static_str(if question.by_claim { "c" } else { "p" }));
            }
            Words { keys, args }
        };
        let wake = questions.first().map_or(0, |question| question.place.wake);
        let answer = self.call(&ADMIT, wake, words).await?;
        let entries: Result<Vec<Entry>> = array(&answer)?.iter().map(read).collect();
        let entries = entries?;
        if entries.len() != questions.len() {
            return Err(strange(&answer));
        }
        Ok(entries)
    }

    pub(crate) async fn admit(&self, questions: &[Question]) -> Result<Vec<Entry>> {
        let mut groups: HashMap<&str, Vec<usize>> = HashMap::new();
        for (index, question) in questions.iter().enumerate() {
            let slot = if self.keys.clustered() { question.place.tag.as_str() } else { "" };
            groups.entry(slot).or_default().push(index);
        }
        let chunks: Vec<&[usize]> = groups.values().flat_map(|all| all.chunks(CHUNK)).collect();
        let calls = chunks.iter().map(|chunk| async move {
            let chosen: Vec<&Question> = chunk.iter().map(|index| &questions[*index]).collect();
            self.admit_chunk(&chosen).await
        });
        let mut entries = vec![None; questions.len()];
        for (chunk, answers) in chunks.iter().zip(futures_util::future::join_all(calls).await) {
            for (index, answer) in chunk.iter().zip(answers?) {
                entries[*index] = Some(answer);
            }
        }
        // every index is in one chunk, and every chunk has its answers
        Ok(entries.into_iter().flatten().collect())
    }

    /// Completes an entry (keeping it for `retain`) or abandons it; says whether it was `owner`'s.
    pub(crate) async fn settle(
        &self,
        place: &Place,
        owner: Owner,
        retain: Option<Duration>,
    ) -> Result<bool> {
        let words = || Words {
            keys: vec![Value::from(place.name.as_str()), self.keys.mark(&place.tag, owner)],
            args: vec![
                self.keys.owner(owner).into(),
                retain.map_or(Value::Integer(0), millis),
                millis(KEEP_MARK),
            ],
        };
        let limit = self.settings.command_limit;
        let mut answer = self.run(&SETTLE, place.wake, limit, words).await;
        if retain.is_some() && answer.as_ref().is_err_and(|error| !is_answer(error)) {
            // completing twice is completing once
            tokio::time::sleep(Duration::from_millis(50)).await;
            answer = self.run(&SETTLE, place.wake, limit, words).await;
        }
        let answer = answer.map_err(mapped)?;
        Ok(answer.as_i64().ok_or_else(|| strange(&answer))? == 1)
    }
}

fn read(answer: &Value) -> Result<Entry> {
    let parts = array(answer)?;
    let second = || number(parts.get(1)).ok_or_else(|| strange(answer));
    let time = |micros| SystemTime::UNIX_EPOCH + Duration::from_micros(micros);
    match parts.first().and_then(Value::as_i64) {
        Some(1) => Ok(Entry::Answer(AdmitAnswer::First(FencingToken(second()?)))),
        Some(2) => Ok(Entry::Answer(AdmitAnswer::InProgress { since: time(second()?) })),
        Some(3) => Ok(Entry::Answer(AdmitAnswer::Done { at: time(second()?) })),
        Some(4) => Ok(Entry::Reserved { since: time(second()?) }),
        Some(-1) => {
            let detail = "the request arrived after it had been given up";
            Err(Error::new(ErrorKind::Unavailable, detail))
        }
        _ => Err(strange(answer)),
    }
}

#[async_trait]
impl DedupeDriver for Entries {
    fn backend(&self) -> &'static str {
        NAME
    }

    async fn admit(&self, items: &[Admit]) -> Result<Vec<AdmitAnswer>> {
        let longest = items.iter().filter_map(|item| item.in_progress).max();
        self.conn.told.keep_for(longest.unwrap_or_default());
        let questions: Vec<Question> = items
            .iter()
            .map(|item| Question {
                place: self.conn.keys.place(Kind::Dedupe, &item.key),
                owner: item.owner,
                in_progress: item.in_progress,
                retain: item.retain,
                by_claim: false,
            })
            .collect();
        let entries = self.conn.admit(&questions).await?;
        Ok(entries
            .into_iter()
            .map(|entry| match entry {
                Entry::Answer(answer) => answer,
                Entry::Reserved { since } => AdmitAnswer::InProgress { since },
            })
            .collect())
    }

    async fn complete(&self, key: &Key, owner: Owner, retain: Duration) -> Result<bool> {
        self.settle(key, owner, Some(retain)).await
    }

    async fn abandon(&self, key: &Key, owner: Owner) -> Result<bool> {
        self.settle(key, owner, None).await
    }

    fn answer_limit(&self) -> Duration {
        // two attempts
        self.conn.answer_limit() * 2
    }
}
