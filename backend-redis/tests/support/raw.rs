//! A connection of our own that speaks the server's protocol, nothing else.

use std::fmt::Write;
use std::io;

use leasehold_core::{Error, ErrorKind};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

/// What a server answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    Nil,
    Number(i64),
    Text(String),
    Error(String),
    List(Vec<Reply>),
}

impl Reply {
    pub fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    pub fn number(&self) -> i64 {
        match self {
            Self::Number(number) => *number,
            other => panic!("not a number: {other:?}"),
        }
    }

    pub fn texts(&self) -> Vec<String> {
        match self {
            Self::List(list) => {
                list.iter().filter_map(|part| part.text().map(str::to_owned)).collect()
            }
            other => panic!("not a list: {other:?}"),
        }
    }
}

/// A raw connection.
#[derive(Debug)]
pub struct Raw(BufReader<TcpStream>);

impl Raw {
    pub async fn open(port: u16) -> Result<Self, Error> {
        let stream = TcpStream::connect(("127.0.0.1", port)).await;
        Ok(Self(BufReader::new(stream.map_err(failed)?)))
    }

    /// Sends a command and reads its answer; an error of the server is an answer.
    pub async fn ask(&mut self, words: &[&str]) -> Result<Reply, Error> {
        let mut request = format!("*{}\r\n", words.len());
        for word in words {
            let _ = write!(request, "${}\r\n{word}\r\n", word.len()); // a String takes it
        }
        let stream = self.0.get_mut();
        stream.write_all(request.as_bytes()).await.map_err(failed)?;
        Box::pin(self.reply()).await.map_err(failed)
    }

    /// As [`ask`](Self::ask), but an error of the server is one.
    pub async fn tell(&mut self, words: &[&str]) -> Result<Reply, Error> {
        match self.ask(words).await? {
            Reply::Error(error) => Err(Error::new(ErrorKind::Backend, error)),
            reply => Ok(reply),
        }
    }

    async fn reply(&mut self) -> io::Result<Reply> {
        let mut line = String::new();
        if self.0.read_line(&mut line).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let rest = line[1..].trim_end();
        let number = || rest.parse::<i64>().map_err(io::Error::other);
        Ok(match line.as_bytes()[0] {
            b'+' => Reply::Text(rest.to_owned()),
            b'-' => Reply::Error(rest.to_owned()),
            b':' => Reply::Number(number()?),
            b'$' => match usize::try_from(number()?) {
                Err(_) => Reply::Nil,
                Ok(length) => {
                    let mut bytes = vec![0; length + 2];
                    self.0.read_exact(&mut bytes).await?;
                    bytes.truncate(length);
                    Reply::Text(String::from_utf8_lossy(&bytes).into_owned())
                }
            },
            b'*' => match usize::try_from(number()?) {
                Err(_) => Reply::Nil,
                Ok(length) => {
                    let mut list = Vec::with_capacity(length);
                    for _ in 0..length {
                        list.push(Box::pin(self.reply()).await?);
                    }
                    Reply::List(list)
                }
            },
            _ => return Err(io::Error::other(format!("not an answer: {line:?}"))),
        })
    }
}

fn failed(error: io::Error) -> Error {
    Error::new(ErrorKind::Unavailable, "the raw connection failed").with_source(error)
}
