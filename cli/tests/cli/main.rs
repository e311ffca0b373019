//! The command, as processes on real servers.

mod doctor;
mod help;
mod json;
mod killed;
mod loss;
mod run;
mod secrets;
mod signals;
mod support;
mod terminal;
mod verify;
