//! leasehold on MySQL and MariaDB.
