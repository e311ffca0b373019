-- The schema of leasehold on PostgreSQL, version 2.
--
-- `PostgresBackend::migrate` applies it; or apply it by hand, e.g. with psql, and grant what the
-- service's role needs:
--
--   GRANT USAGE ON SCHEMA leasehold TO service;
--   GRANT SELECT, INSERT, UPDATE, DELETE ON leasehold.lease, leasehold.dedupe TO service;
--   GRANT SELECT ON leasehold.version TO service;
--   GRANT USAGE ON SEQUENCE leasehold.token TO service;
--
-- (For another schema name, replace `leasehold.` and the name in the first statement.)

CREATE SCHEMA IF NOT EXISTS leasehold;

-- Fencing tokens of all kinds and keys. No cache: a later call must give a greater number, also
-- in another session.
CREATE SEQUENCE IF NOT EXISTS leasehold.token AS bigint CACHE 1 NO CYCLE;

-- Leases that are held, or were and expired. Their tokens come from the sequence when the row is
-- locked, so that rows can be deleted at any time; that of the holder is here to be read, and so
-- are who it is (UTF-8: app@host:pid#instance) and since when.
--
-- Row ids are hashes of namespace and key: of fixed size, and free of collations, encodings and
-- index limits; namespace and key (UTF-8) are there to be read.
--
-- Keys are (id) and (id, owner): a new owner changes a key, so that it needs the row's strongest
-- lock, and a renewal does not. `LeaseGuard::verify` takes a key-share lock, which thus keeps others
-- from taking the lease over and lets its holder renew it. A renewal touches no index.
CREATE TABLE IF NOT EXISTS leasehold.lease (
    id         bytea       NOT NULL PRIMARY KEY,
    namespace  bytea       NOT NULL,
    key        bytea       NOT NULL,
    owner      bytea       NOT NULL,
    expires_at timestamptz NOT NULL,
    holder     bytea,
    since      timestamptz,
    token      bigint,
    UNIQUE (id, owner)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05);

-- Keys in progress (`done` is false; it can be taken over at `expires_at`) and done (forgotten at
-- `expires_at`).
CREATE TABLE IF NOT EXISTS leasehold.dedupe (
    id         bytea       NOT NULL PRIMARY KEY,
    namespace  bytea       NOT NULL,
    key        bytea       NOT NULL,
    owner      bytea       NOT NULL,
    done       boolean     NOT NULL,
    since      timestamptz NOT NULL,
    expires_at timestamptz NOT NULL,
    holder     bytea
) WITH (autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX IF NOT EXISTS dedupe_expires_at ON leasehold.dedupe (expires_at);

-- Tables of version 1 lack these columns.
ALTER TABLE leasehold.lease
    ADD COLUMN IF NOT EXISTS holder bytea,
    ADD COLUMN IF NOT EXISTS since timestamptz,
    ADD COLUMN IF NOT EXISTS token bigint;
ALTER TABLE leasehold.dedupe ADD COLUMN IF NOT EXISTS holder bytea;

CREATE TABLE IF NOT EXISTS leasehold.version (version integer NOT NULL PRIMARY KEY);
INSERT INTO leasehold.version VALUES (2) ON CONFLICT DO NOTHING;
DELETE FROM leasehold.version WHERE version < 2;
