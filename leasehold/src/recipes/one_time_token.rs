//! [`OneTimeTokens`]: secrets that are accepted once.

use std::fmt::{self, Write};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use sha2::{Digest, Sha256};

use super::part;
use crate::{
    Admission, Dedupe, DedupeGuard, DedupeOptions, Error, ErrorKind, Key, MAX_RETAIN, MIN_TTL,
    Result,
};

/// A redemption that was begun and not ended can be tried again after so long.
const ATTEMPT: Duration = Duration::from_secs(10);
/// How long a token that was never issued looks as if somebody were at it, if the process dies
/// while it looks.
const PROBE: Duration = Duration::from_secs(1);
/// Characters of a secret: 256 bits.
const SECRET_CHARS: usize = 64;

/// Issues secrets, e.g. for a link or an upgrade, each of which is accepted once and only for a
/// while.
///
/// The store sees only a SHA-256 hash, so that who reads the store cannot redeem anything. A token
/// is issued by an entry `issued/<hash>` that expires after the ttl, and redeemed by completing an
/// entry `consumed/<hash>`.
///
/// **Guaranteed:** a token is accepted at most once, over all processes, and only within its ttl by
/// the store's clock. One that was never issued is refused and leaves nothing that would ever
/// validate it. If the process dies while it redeems, the token can be redeemed again after 10 s.
///
/// **Not guaranteed:** that what a redemption is for happens: an error from
/// [`redeem`](Self::redeem) may have consumed the token. Issue another one then.
///
/// ```
/// use std::sync::Arc;
/// use std::time::Duration;
/// use leasehold::memory::MemoryBackend;
/// use leasehold::recipes::OneTimeTokens;
/// use leasehold::Key;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> leasehold::Result<()> {
/// let tokens = OneTimeTokens::new(Arc::new(MemoryBackend::new()), Key::new("upgrade/user-7")?);
/// let token = tokens.issue(Duration::from_secs(30)).await?;
/// assert!(tokens.redeem(token.expose_secret()).await?.is_accepted());
/// assert!(!tokens.redeem(token.expose_secret()).await?.is_accepted());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct OneTimeTokens {
    dedupe: Arc<dyn Dedupe>,
    purpose: Key,
}

/// A secret that was issued. Its `Debug` does not show it, and it has no `Display`.
#[derive(Clone, PartialEq, Eq)]
pub struct OneTimeToken(String);

impl OneTimeToken {
    /// The secret, to be given to who may redeem it: letters, digits and a dot.
    pub fn expose_secret(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for OneTimeToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OneTimeToken(..)")
    }
}

/// The answer to [`OneTimeTokens::redeem`]. Tell a stranger no more than whether it is accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Redemption {
    /// It is good, and from now on consumed.
    Accepted {
        /// When it was issued, by the store's clock.
        issued: SystemTime,
    },
    /// It was redeemed before, or somebody is at it at this moment.
    Used,
    /// It was never issued for this purpose, or it has expired.
    Unknown,
}

impl Redemption {
    /// Whether it is good.
    pub fn is_accepted(&self) -> bool {
        matches!(self, Self::Accepted { .. })
    }
}

impl OneTimeTokens {
    /// Tokens for one purpose: those of another are unknown to it. Put into it whom a token is for.
    pub fn new(dedupe: Arc<dyn Dedupe>, purpose: Key) -> Self {
        Self { dedupe, purpose }
    }

    /// Issues a token that is good for `ttl`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOptions`] for a ttl outside [`MIN_TTL`] to [`MAX_RETAIN`], and those of
    /// [`Dedupe::admit`].
    ///
    /// # Cancel safety
    /// Safe: what was issued to nobody expires.
    pub async fn issue(&self, ttl: Duration) -> Result<OneTimeToken> {
        let secret: [u8; SECRET_CHARS / 2] = rand::random();
        // the ttl is part of what is hashed: who redeems it must know how long to remember it
        let token = format!("{}.{:x}", hex(&secret), ttl.as_millis());
        let opts = DedupeOptions::default().retain(ttl).done_at_once();
        if self.dedupe.admit(&self.key("issued", &token)?, opts).await?.is_first() {
            return Ok(OneTimeToken(token));
        }
        let detail = "a random secret was there before: the source of randomness is broken";
        Err(Error::new(ErrorKind::Backend, detail).on(&self.purpose))
    }

    /// Redeems what somebody presents.
    ///
    /// # Errors
    /// Those of [`Dedupe::admit`] and [`DedupeGuard::complete`]: the token may be consumed then.
    ///
    /// # Cancel safety
    /// Safe: the token is then consumed, or can be redeemed again soon.
    pub async fn redeem(&self, presented: &str) -> Result<Redemption> {
        let Some(ttl) = ttl(presented) else {
            return Ok(Redemption::Unknown);
        };
        // Begun before it is looked up: what was consumed by others stays known until after the
        // token has expired, however long this process is paused between the two.
        let opts = DedupeOptions::default().retain(ttl).in_progress(ATTEMPT);
        let consumed = self.key("consumed", presented)?;
        let Admission::First(redeeming) = self.dedupe.admit(&consumed, opts).await? else {
            return Ok(Redemption::Used);
        };
        let opts = DedupeOptions::default().in_progress(PROBE);
        match self.dedupe.admit(&self.key("issued", presented)?, opts).await? {
            Admission::Done { at } => match redeeming.complete().await {
                Ok(()) => Ok(Redemption::Accepted { issued: at }),
                // it took too long, and somebody else redeemed it
                Err(error) if error.kind() == ErrorKind::Lost => Ok(Redemption::Used),
                Err(error) => Err(error),
            },
            // not issued: looking made an entry that is in progress, which validates nothing
            Admission::First(probe) => {
                abandoned(probe).await;
                abandoned(redeeming).await;
                Ok(Redemption::Unknown)
            }
            Admission::InProgress { .. } => {
                abandoned(redeeming).await;
                Ok(Redemption::Unknown)
            }
        }
    }

    fn key(&self, state: &str, token: &str) -> Result<Key> {
        part(&self.purpose, format_args!("{state}/{}", hex(&Sha256::digest(token))))
    }
}

/// The answer is known whatever becomes of it; it ends by itself.
async fn abandoned(entry: DedupeGuard) {
    if let Err(error) = entry.abandon().await {
        tracing::debug!(%error, "the entry of an unknown token is left to end by itself");
    }
}

/// The ttl of a well-formed token.
fn ttl(token: &str) -> Option<Duration> {
    let (secret, ttl) = token.split_once('.')?;
    let well_formed = secret.len() == SECRET_CHARS
        && ttl.len() <= 16
        && token.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f' | b'.'));
    let ttl = Duration::from_millis(u64::from_str_radix(ttl, 16).ok()?);
    (well_formed && (MIN_TTL..=MAX_RETAIN).contains(&ttl)).then_some(ttl)
}

fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        // writing to a string does not fail
        write!(text, "{byte:02x}").unwrap_or_default();
    }
    text
}
