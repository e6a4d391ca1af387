//! `zsctl token`: tokens with roles.

use clap::Subcommand;
use serde_json::json;
use zeroshard_client::Result;
use zeroshard_proto::{Role, Token, Tokens};

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Make a token, and the line for the file that servers read with --tokens. The line has a
    /// hash, so only the user of the token has the token itself
    New {
        /// Role of the token: server (register a shard server), admin (all jobs), job:NAME (create,
        /// train and delete this job) or job:NAME:read
        role: Role,
    },
}

/// Runs a command, which needs no cluster.
///
/// # Errors
/// [`zeroshard_proto::Error::Internal`] if the system has no random numbers.
#[expect(clippy::print_stdout, reason = "the program's output")]
pub(crate) fn run(command: &Command, json: bool) -> Result<()> {
    let Command::New { role } = command;
    let token = Token::random()?;
    let (line, text) = (Tokens::line(role, &token), token.reveal().unwrap_or_default());
    if json {
        println!("{}", json!({"event": "token", "token": text, "line": line}));
    } else {
        println!("token, for ZEROSHARD_TOKEN or a file of its user:\n{text}\n");
        println!("line for the file of tokens:\n{line}");
    }
    Ok(())
}
