//! Invalid flags, values and files: the program ends at once, without success, and names the valid
//! values.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpListener,
    process::{Command, Stdio},
};

use zeroshard_tests::{Cluster, binary, run};

/// The message of a program that refuses its arguments.
fn refusal(program: &str, arguments: &[&str]) -> String {
    let output = run(program, arguments);
    assert!(
        output.status.code().is_some_and(|code| code != 0),
        "{program} {arguments:?}: {}",
        output.status
    );
    assert!(output.stdout.is_empty(), "standard output is for results");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn every_program_has_help_and_a_version() {
    for (program, commands) in [
        ("zeroshard-server", &["", "coordinator", "shard", "all"][..]),
        (
            "zsctl",
            &[
                "",
                "status",
                "why",
                "top",
                "follow",
                "tensors",
                "hash",
                "delete",
                "checkpoint",
                "cordon",
                "uncordon",
                "drain",
                "evict",
                "doctor",
                "completion",
            ],
        ),
        ("zs-bench", &["", "transfer", "optimizer", "step"]),
        ("zeroshard-worker", &["", "train"]),
    ] {
        for command in commands {
            let arguments: Vec<&str> =
                [*command, "--help"].into_iter().filter(|word| !word.is_empty()).collect();
            let output = run(program, &arguments);
            assert!(output.status.success(), "{program} {arguments:?}");
            assert!(
                String::from_utf8(output.stdout).unwrap().contains("Usage:"),
                "{program} {arguments:?}"
            );
        }
        assert!(run(program, &["--version"]).status.success());
        assert!(refusal(program, &["nonsense"]).contains("nonsense"));
        assert!(refusal(program, &["--nonsense"]).contains("--nonsense"));
    }
}

#[test]
fn a_value_out_of_range_is_refused_with_its_range() {
    for (flags, expected) in [
        (&["--wait-seconds", "0"][..], "1 to 600"),
        (&["--frame-bytes", "5"], "16384 to 16777215"),
        (&["--max-message-bytes", "1"], "1024 to 2147483648"),
        (&["--keepalive-seconds", "0"], "1 to 3600"),
        (&["--log", "a=b=c"], "info"),
        (&["--listen", "nowhere"], "--listen"),
        (&["--admin-listen", "127.0.0.1"], "--admin-listen"),
        (&["--parked-bytes", "-1"], "-1"),
    ] {
        let arguments = [&["shard", "--coordinator", "127.0.0.1:1"], flags].concat();
        let said = refusal("zeroshard-server", &arguments);
        assert!(said.contains(expected), "{flags:?}: {said}");
    }
}

#[test]
fn a_shard_server_without_a_coordinator_address_is_refused() {
    let said =
        refusal("zeroshard-server", &["shard", "--listen", "127.0.0.1:0", "--admin-listen", "off"]);
    assert!(said.contains("--coordinator") && said.contains("HOST:PORT"), "{said}");
}

#[test]
fn a_wildcard_address_needs_an_address_to_advertise() {
    let arguments =
        ["shard", "--coordinator", "127.0.0.1:1", "--listen", "0.0.0.0:0", "--admin-listen", "off"];
    let said = refusal("zeroshard-server", &arguments);
    assert!(said.contains("--advertise"), "{said}");
}

#[test]
fn an_address_in_use_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for flags in [
        ["--listen", &address, "--admin-listen", "off"],
        ["--listen", "127.0.0.1:0", "--admin-listen", &address],
    ] {
        let said = refusal("zeroshard-server", &[&["coordinator"], &flags[..]].concat());
        assert!(said.contains(&address), "{said}");
    }
}

#[test]
fn an_invalid_configuration_file_is_refused_with_the_position() {
    for (text, expected) in [
        ("[common]\nwait_second = 7\n", "wait_second"),
        ("[comon]\n", "comon"),
        ("[common]\nwait_seconds = \"long\"\n", "wait_seconds"),
        ("[common]\nwait_seconds = 0\n", "1 to 600"),
        ("[common\n", "TOML"),
    ] {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        let path = file.path().to_str().unwrap();
        let said = refusal("zeroshard-server", &["coordinator", "--config", path]);
        assert!(said.contains(expected), "{text:?}: {said}");
    }
    assert!(
        refusal("zeroshard-server", &["coordinator", "--config", "/nowhere.toml"])
            .contains("/nowhere.toml")
    );
}

fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

#[test]
fn every_program_names_an_unreachable_coordinator_and_the_cause() {
    let address = free_address();
    let worker =
        ["train", "--job", "a", "--rank", "0", "--address", &address, "--connect-timeout", "1"];
    for (program, arguments) in [
        ("zsctl", &["--address", &address, "--timeout", "1", "status"][..]),
        ("zeroshard-worker", &worker),
    ] {
        let said = refusal(program, arguments);
        assert!(said.contains(&address) && said.contains("Connection refused"), "{said}");
    }
    assert!(refusal("zsctl", &["--address", "nowhere", "status"]).contains("host:port"));
}

#[test]
fn a_program_reports_once_that_it_waits_for_a_coordinator_which_starts_later() {
    let address = free_address();
    // The first test that uses a binary builds it, which may take longer than the program waits.
    binary("zeroshard-server");
    let mut waiting = Command::new(binary("zsctl"))
        .args(["--address", &address, "--json", "status"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(waiting.stderr.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    assert!(line.contains("waiting") && line.contains(&address), "{line}");
    let _coordinator = Cluster::coordinator_at(&address);
    let mut rest = String::new();
    said.read_to_string(&mut rest).unwrap();
    // The cluster has no servers, which is a problem and no error.
    assert_eq!(waiting.wait().unwrap().code(), Some(3), "{rest}");
    assert_eq!(rest, "");
}
