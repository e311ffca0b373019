//! The command, as processes on real servers.

mod help;
mod json;
mod loss;
mod run;
mod secrets;
mod signals;
mod support;
mod terminal;
