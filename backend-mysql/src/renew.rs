//! Renewals of leases: all in one statement, and what others keep does not hold up the rest.

use std::collections::HashSet;
use std::time::Duration;

use leasehold_core::backend::Renewal;
use leasehold_core::{Error, ErrorKind, Result};
use mysql_async::TxOpts;
use mysql_async::prelude::Queryable;

use crate::error::{is_transient, mapped};
use crate::lease::{Leases, owner_bytes};
use crate::names::hex;
use crate::store::NOW;

type Owners = HashSet<Vec<u8>>;

/// In milliseconds, before each further try for rows that somebody keeps: others only for a moment,
/// an open transaction for longer. A renewal has a quarter of the shortest ttl for all of them.
const KEPT_PAUSES: [u64; 10] = [5, 5, 5, 5, 10, 10, 10, 10, 20, 20];

impl Leases {
    /// Tells of each whether it is held and was renewed.
    pub(crate) async fn renew_batch(&self, renewals: &[Renewal]) -> Result<Vec<Result<bool>>> {
        if renewals.is_empty() {
            return Ok(Vec::new());
        }
        let mine = self.mine(renewals.iter());
        if self.renew_all(&mine).await? == renewals.len() as u64 {
            return Ok(renewals.iter().map(|_| Ok(true)).collect());
        }
        // some are not ours any more, or kept: for long by somebody's `verify`, or for a moment by
        // a try for them
        let (renewed, held) = self.renew_free(&mine).await?;
        let (renewed, held) = self.renew_kept(renewals, renewed, held).await?;
        let outcome = |renewal: &Renewal| {
            let owner = owner_bytes(renewal.owner);
            if renewed.contains(owner.as_slice()) {
                Ok(true)
            } else if held.contains(owner.as_slice()) {
                let detail = "a transaction that verified the lease is still open";
                Err(Error::new(ErrorKind::Unavailable, detail))
            } else {
                Ok(false)
            }
        };
        Ok(renewals.iter().map(outcome).collect())
    }

    /// The condition of being held, to be looked up by the primary key: a scan would lock others.
    /// An owner is of one acquisition, so no pair of an id and another one's owner can match.
    fn mine<'r>(&self, renewals: impl Iterator<Item = &'r Renewal> + Clone) -> String {
        let ids: Vec<String> = renewals.clone().map(|r| hex(&self.row(&r.key))).collect();
        let owners: Vec<String> = renewals.map(|r| hex(&owner_bytes(r.owner))).collect();
        let (ids, owners) = (ids.join(","), owners.join(","));
        format!("id IN ({ids}) AND owner IN ({owners}) AND expires > {NOW}")
    }

    /// Renews in one statement that does not wait for a row: a renewal must not be late because of
    /// another one. Says how many.
    async fn renew_all(&self, mine: &str) -> Result<u64> {
        let lease = &self.store.tables.lease;
        let renew = if self.store.is_maria() {
            // there SKIP LOCKED is not heeded within an update; no wait at all fails it instead
            format!(
                "SET STATEMENT innodb_lock_wait_timeout = 0 FOR \
                 UPDATE {lease} FORCE INDEX (PRIMARY) SET expires = {NOW} + ttl WHERE {mine}"
            )
        } else {
            // the limit keeps the inner query from being merged into the outer one, which then must
            // look up the rows that the inner one has locked, and not scan
            format!(
                "UPDATE (SELECT id FROM {lease} FORCE INDEX (PRIMARY) WHERE {mine} \
                 LIMIT 1000000 FOR UPDATE SKIP LOCKED) free \
                 STRAIGHT_JOIN {lease} FORCE INDEX (PRIMARY) ON {lease}.id = free.id \
                 SET expires = {NOW} + ttl"
            )
        };
        let mut conn = self.store.renewing.get_conn().await.map_err(mapped)?;
        match conn.query_drop(renew).await {
            Ok(()) => Ok(conn.affected_rows()),
            Err(error) if is_transient(&error) => Ok(0),
            Err(error) => Err(mapped(error)),
        }
    }

    /// Renews those whose rows nobody keeps. Gives their owners, and those of all that are held.
    async fn renew_free(&self, mine: &str) -> Result<(Owners, Owners)> {
        let lease = &self.store.tables.lease;
        let mut conn = self.store.renewing.get_conn().await.map_err(mapped)?;
        let opts = TxOpts::default();
        let mut tx = conn.start_transaction(opts).await.map_err(mapped)?;
        let free = format!(
            "SELECT id, owner FROM {lease} FORCE INDEX (PRIMARY) WHERE {mine} \
             FOR UPDATE SKIP LOCKED"
        );
        let free: Vec<(Vec<u8>, Vec<u8>)> = tx.query(free).await.map_err(mapped)?;
        if !free.is_empty() {
            // by their ids alone: a kept row must not even be looked at
            let list: Vec<String> = free.iter().map(|(id, _)| hex(id)).collect();
            let renew = format!(
                "UPDATE {lease} FORCE INDEX (PRIMARY) SET expires = {NOW} + ttl \
                 WHERE id IN ({}) AND expires > {NOW}",
                list.join(",")
            );
            // one that expires in between is not renewed, and is not in the list that is read next
            tx.query_drop(renew).await.map_err(mapped)?;
        }
        let held = format!("SELECT owner FROM {lease} WHERE {mine}");
        let held: Vec<Vec<u8>> = tx.query(held).await.map_err(mapped)?;
        tx.commit().await.map_err(mapped)?;
        let held: Owners = held.into_iter().collect();
        let free = free.into_iter().map(|(_, owner)| owner);
        let renewed = free.filter(|owner| held.contains(owner)).collect();
        Ok((renewed, held))
    }

    /// Tries again for those that are held and were not renewed, for a moment: the others have had
    /// their turn, so these alone are asked for, in a statement a time as long as nothing changes.
    async fn renew_kept(
        &self,
        renewals: &[Renewal],
        mut renewed: Owners,
        mut held: Owners,
    ) -> Result<(Owners, Owners)> {
        let shortest = renewals.iter().map(|renewal| renewal.ttl).min().unwrap_or_default();
        for (tries, pause) in (1..).zip(KEPT_PAUSES) {
            let is_kept = |renewal: &&Renewal| {
                let owner = owner_bytes(renewal.owner);
                held.contains(owner.as_slice()) && !renewed.contains(owner.as_slice())
            };
            let kept: Vec<&Renewal> = renewals.iter().filter(is_kept).collect();
            if kept.is_empty() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(pause).min(shortest / 64)).await;
            let mine = self.mine(kept.iter().copied());
            let count = self.renew_all(&mine).await?;
            // MariaDB renews none if one of several is kept; which were is not told
            let some = count > 0 || self.store.is_maria();
            if count == kept.len() as u64 {
                renewed.extend(kept.iter().map(|renewal| owner_bytes(renewal.owner).to_vec()));
            } else if (kept.len() > 1 && some) || tries == KEPT_PAUSES.len() {
                let again;
                (again, held) = self.renew_free(&mine).await?;
                renewed.extend(again);
            }
        }
        Ok((renewed, held))
    }
}
