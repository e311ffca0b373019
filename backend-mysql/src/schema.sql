-- The tables of leasehold on MySQL 8.0+ and MariaDB 10.6+. `migrate()` runs these statements, with
-- `leasehold_` replaced by the configured prefix; run them by hand where a service may not.
--
-- Times are microseconds since 1970 in UTC, by the server's clock, so that neither time zones nor
-- daylight saving matter. Keys are SHA-256 hashes in binary columns, so that no collation does.
-- `scope` is a namespace, `name` a key, `holder` who holds it, as `app@host:pid#instance`: for those
-- who look, nothing is decided by them.

CREATE TABLE IF NOT EXISTS `leasehold_meta` (
    id TINYINT UNSIGNED NOT NULL PRIMARY KEY,
    version INT UNSIGNED NOT NULL,
    -- no token at or below this is given to a new row: raised before rows are purged
    floor BIGINT UNSIGNED NOT NULL
) ENGINE = InnoDB;

INSERT IGNORE INTO `leasehold_meta` (id, version, floor) VALUES (1, 3, 0);

CREATE TABLE IF NOT EXISTS `leasehold_lease` (
    id BINARY(32) NOT NULL PRIMARY KEY,
    scope VARBINARY(200) NOT NULL,
    name VARBINARY(1024) NOT NULL,
    owner BINARY(16) NOT NULL,
    token BIGINT UNSIGNED NOT NULL,
    ttl BIGINT NOT NULL,
    expires BIGINT NOT NULL,
    -- the holder's bell, a user-level lock, and whether the release must ring it
    bell BIGINT UNSIGNED NOT NULL,
    awaited TINYINT UNSIGNED NOT NULL,
    -- since when its holder has it
    since BIGINT NOT NULL DEFAULT 0,
    holder VARBINARY(160) NOT NULL DEFAULT '',
    KEY by_expiry (expires, token)
) ENGINE = InnoDB;

CREATE TABLE IF NOT EXISTS `leasehold_dedupe` (
    id BINARY(32) NOT NULL PRIMARY KEY,
    owner BINARY(16) NOT NULL,
    token BIGINT UNSIGNED NOT NULL,
    -- whether it is done; else it is in progress
    done TINYINT UNSIGNED NOT NULL,
    -- when it was admitted, or completed
    since BIGINT NOT NULL,
    expires BIGINT NOT NULL,
    scope VARBINARY(200),
    name VARBINARY(1024),
    holder VARBINARY(160) NOT NULL DEFAULT '',
    KEY by_expiry (expires, token)
) ENGINE = InnoDB;

-- a sequence: the tokens of named locks and claims
CREATE TABLE IF NOT EXISTS `leasehold_token` (
    id BIGINT UNSIGNED NOT NULL AUTO_INCREMENT PRIMARY KEY
) ENGINE = InnoDB;

-- the rows that claims lock where there are no user-level locks
CREATE TABLE IF NOT EXISTS `leasehold_claim` (
    id BINARY(32) NOT NULL PRIMARY KEY,
    used BIGINT NOT NULL,
    -- written by the transaction that has it, for those who read what is not committed: its
    -- connection, since when, and a number that no other one has
    connection BIGINT UNSIGNED NOT NULL DEFAULT 0,
    since BIGINT NOT NULL DEFAULT 0,
    mark BIGINT UNSIGNED NOT NULL DEFAULT 0,
    scope VARBINARY(200) NOT NULL DEFAULT '',
    holder VARBINARY(160) NOT NULL DEFAULT '',
    KEY by_use (used)
) ENGINE = InnoDB;

-- whose the connections are that hold user-level locks
CREATE TABLE IF NOT EXISTS `leasehold_session` (
    connection BIGINT UNSIGNED NOT NULL,
    scope VARBINARY(200) NOT NULL,
    holder VARBINARY(160) NOT NULL,
    -- a user-level lock that it has as long as it lives; empty for one of a pool
    marker VARBINARY(64) NOT NULL,
    since BIGINT NOT NULL,
    PRIMARY KEY (connection, scope)
) ENGINE = InnoDB;
