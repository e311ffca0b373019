//! SQLite only.

