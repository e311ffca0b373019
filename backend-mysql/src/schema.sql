-- The tables of leasehold on MySQL 8.0+ and MariaDB 10.6+. `migrate()` runs these statements, with
-- `leasehold_` replaced by the configured prefix; run them by hand where a service may not.
--
-- Times are microseconds since 1970 in UTC, by the server's clock, so that neither time zones nor
-- daylight saving matter. Keys are SHA-256 hashes in binary columns, so that no collation does.

CREATE TABLE IF NOT EXISTS `leasehold_meta` (
    id TINYINT UNSIGNED NOT NULL PRIMARY KEY,
    version INT UNSIGNED NOT NULL,
    -- no token at or below this is given to a new row: raised before rows are purged
    floor BIGINT UNSIGNED NOT NULL
) ENGINE = InnoDB;

INSERT IGNORE INTO `leasehold_meta` (id, version, floor) VALUES (1, 2, 0);

CREATE TABLE IF NOT EXISTS `leasehold_lease` (
    id BINARY(32) NOT NULL PRIMARY KEY,
    -- for the reader of the table only: what was hashed
    scope VARBINARY(200) NOT NULL,
    name VARBINARY(1024) NOT NULL,
    owner BINARY(16) NOT NULL,
    token BIGINT UNSIGNED NOT NULL,
    ttl BIGINT NOT NULL,
    expires BIGINT NOT NULL,
    -- the holder's bell, a user-level lock, and whether the release must ring it
    bell BIGINT UNSIGNED NOT NULL,
    awaited TINYINT UNSIGNED NOT NULL,
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
    KEY by_use (used)
) ENGINE = InnoDB;
