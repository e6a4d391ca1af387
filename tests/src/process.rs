//! Child processes that run the binaries of the project.

use std::{
    collections::BTreeMap,
    env,
    ffi::OsStr,
    fs::File,
    io::{self, BufRead, BufReader, Read},
    path::PathBuf,
    process::{Child, Command, ExitStatus, Output, Stdio},
    sync::{Arc, Mutex, OnceLock, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

/// The time limit for a process to listen, or to stop.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// The time limit for a program that ends by itself.
const RUN_TIMEOUT: Duration = Duration::from_secs(600);

/// The path of a binary of this workspace, in cargo's directory of the running program. Under
/// `cargo test`, each test program builds the binary once.
///
/// # Panics
/// If the binary does not build or does not exist.
pub fn binary(name: &str) -> PathBuf {
    let exe = env::current_exe().expect("a running program has a path");
    let folder = exe.parent().expect("a file is in a folder");
    let is_test = folder.ends_with("deps");
    let folder = if is_test { folder.parent().expect("deps is in a folder") } else { folder };
    if let Some(cargo) = env::var_os("CARGO").filter(|_| is_test) {
        // A test that uses one binary does not wait while another test builds another one.
        static BUILT: Mutex<BTreeMap<String, Arc<OnceLock<()>>>> = Mutex::new(BTreeMap::new());
        let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
        let this = built.entry(name.to_owned()).or_default().clone();
        drop(built);
        this.get_or_init(|| {
            let mut build = Command::new(cargo);
            // cargo has set these for the test. Build scripts read variables of the same names, and
            // run again, as do all crates behind them, if they differ from those of other builds.
            let is_of_package =
                |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
            env::vars_os()
                .filter(|(name, _)| name.to_str().is_some_and(is_of_package))
                .for_each(|(name, _)| _ = build.env_remove(name));
            let profile = match folder.file_name().and_then(OsStr::to_str) {
                Some("debug") | None => "dev",
                Some(profile) => profile,
            };
            build.args(["build", "--quiet", "--locked", "--workspace", "--bin", name]);
            build.args(["--profile", profile]);
            let status =
                build.current_dir(env!("CARGO_MANIFEST_DIR")).status().expect("cargo runs");
            assert!(status.success(), "{name} does not build");
        });
    }
    let path = folder.join(name);
    assert!(
        path.exists(),
        "{} is missing: build it with `cargo build --workspace`",
        path.display()
    );
    path
}

/// Runs a binary of this workspace until it ends.
///
/// # Panics
/// If the binary cannot be started, or does not end in time.
pub fn run<S: AsRef<OsStr>>(name: &str, arguments: &[S]) -> Output {
    let mut command = Command::new(binary(name));
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().expect("the binary exists");
    let pid = child.id().to_string();
    let (sender, receiver) = mpsc::channel();
    // After the deadline the receiver has been dropped.
    thread::spawn(move || _ = sender.send(child.wait_with_output()));
    let Ok(output) = receiver.recv_timeout(RUN_TIMEOUT) else {
        let _ = Command::new("kill").args(["-KILL", &pid]).status();
        panic!("{command:?} did not end within {RUN_TIMEOUT:?}");
    };
    output.expect("the output can be read")
}

/// A child process that listens. The process is killed when this value is dropped.
#[derive(Debug)]
pub struct Process {
    child: Child,
    /// The line in which the process reported its addresses.
    listening: Value,
}

impl Process {
    /// Starts `command`, and waits until it has printed a JSON line with `"event":"listening"`.
    ///
    /// # Panics
    /// If the process cannot be started, ends, or does not listen in time.
    pub fn start(mut command: Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|e| panic!("start {command:?}: {e}"));
        let stdout = child.stdout.take().expect("standard output is piped");
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || {
            let mut stdout = BufReader::new(stdout);
            let mut line = String::new();
            let read = stdout.read_line(&mut line);
            // After the deadline the receiver has been dropped.
            let _ = sender.send(read.map(|_| line));
            // If the pipe were not read, the process would block.
            let _ = io::copy(&mut stdout, &mut io::sink());
        });
        let line = receiver.recv_timeout(START_TIMEOUT);
        let listening = match &line {
            Ok(Ok(line)) => serde_json::from_str::<Value>(line).ok(),
            _ => None,
        };
        match listening.filter(|line| line["event"] == "listening") {
            Some(listening) => Self { child, listening },
            None => {
                let _ = child.kill();
                panic!("{command:?} did not listen; its first line of output is {line:?}");
            }
        }
    }

    /// The `host:port` at which the process listens.
    ///
    /// # Panics
    /// If the process did not report it.
    pub fn address(&self) -> &str {
        self.listening["address"].as_str().expect("listening has an address")
    }

    /// The `host:port` of the admin server.
    ///
    /// # Panics
    /// If the process has no admin server.
    pub fn admin(&self) -> &str {
        self.listening["admin"].as_str().expect("listening has an admin address")
    }

    /// The id of the process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The exit status of the process; `None` while it runs.
    ///
    /// # Panics
    /// If the status cannot be read.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("the process is a child")
    }

    /// The peak of the resident memory of the process, in bytes.
    ///
    /// # Panics
    /// If the system does not report it.
    pub fn peak_memory(&self) -> u64 {
        status_bytes(self.id(), "VmHWM:")
    }

    /// The resident memory of the process, in bytes.
    ///
    /// # Panics
    /// If the system does not report it.
    pub fn memory(&self) -> u64 {
        Self::memory_of(self.id())
    }

    /// The resident memory of a process, in bytes.
    ///
    /// # Panics
    /// If the system does not report it.
    pub fn memory_of(id: u32) -> u64 {
        status_bytes(id, "VmRSS:")
    }

    /// Inverts a bit of the first of these values wherever they follow each other in the memory of
    /// the process. Returns how often.
    ///
    /// # Panics
    /// If the memory cannot be read or written.
    pub fn flip_bit(&self, values: &[f32]) -> usize {
        use std::os::unix::fs::FileExt;
        let pattern: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let folder = PathBuf::from(format!("/proc/{}", self.id()));
        let memory = File::options().read(true).write(true).open(folder.join("mem"));
        let memory = memory.expect("a process may write to the memory of its child");
        let maps = std::fs::read_to_string(folder.join("maps")).expect("Linux has it");
        let mut found = 0;
        let writable = [" rw-p ", " rw-s "];
        let maps = maps.lines().filter(|line| writable.iter().any(|mode| line.contains(mode)));
        for line in maps {
            let (range, _) = line.split_once(' ').expect("an address range");
            let (start, end) = range.split_once('-').expect("two addresses");
            let address = |text| u64::from_str_radix(text, 16).expect("an address");
            let (start, end) = (address(start), address(end));
            let mut bytes = vec![0; (end - start) as usize];
            if memory.read_exact_at(&mut bytes, start).is_err() {
                continue; // a mapping of a device
            }
            let at = bytes.windows(pattern.len()).enumerate().step_by(4);
            for (offset, _) in at.filter(|(_, window)| *window == pattern) {
                let flipped = [bytes[offset] ^ 1];
                memory.write_all_at(&flipped, start + offset as u64).expect("it is writable");
                found += 1;
            }
        }
        found
    }

    /// Sends `GET path` to the admin server, and returns the body.
    ///
    /// # Panics
    /// If there is no response.
    pub fn get(&self, path: &str) -> String {
        use std::io::Write;
        let mut stream =
            std::net::TcpStream::connect(self.admin()).expect("the admin server listens");
        write!(stream, "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            .expect("send");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        answer.split_once("\r\n\r\n").expect("a head and a body").1.to_owned()
    }

    /// Kills the process at once (SIGKILL).
    pub fn kill(&mut self) {
        // This fails only if the process has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Stops the process (SIGSTOP), and lets it continue after `duration`.
    ///
    /// # Panics
    /// If it has ended.
    pub fn stand_still(&self, duration: Duration) {
        Self::stand_still_for(self.id(), duration);
    }

    /// Stops a process (SIGSTOP), and lets it continue after `duration`.
    ///
    /// # Panics
    /// If it has ended.
    pub fn stand_still_for(id: u32, duration: Duration) {
        let pid = id.to_string();
        signal("-STOP", &pid);
        thread::spawn(move || {
            thread::sleep(duration);
            signal("-CONT", &pid);
        });
    }

    /// Sends SIGTERM.
    ///
    /// # Panics
    /// If the process has ended.
    pub fn terminate(&self) {
        signal("-TERM", &self.id().to_string());
    }

    /// Sends SIGTERM, and waits until the process has ended.
    ///
    /// # Panics
    /// If the process does not end in time.
    pub fn stop(self) -> ExitStatus {
        self.terminate();
        self.wait()
    }

    /// Waits until the process has ended.
    ///
    /// # Panics
    /// If the process does not end in time.
    pub fn wait(mut self) -> ExitStatus {
        let pid = self.id().to_string();
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            if let Some(status) = self.child.try_wait().expect("the process is a child") {
                return status;
            }
            assert!(Instant::now() < deadline, "process {pid} did not stop after SIGTERM");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

fn signal(name: &str, pid: &str) {
    let sent = Command::new("kill").args([name, pid]).status();
    assert!(sent.is_ok_and(|status| status.success()), "kill {name} {pid} has failed");
}

fn status_bytes(id: u32, field: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{id}/status")).expect("/proc exists");
    let line = status.lines().find(|line| line.starts_with(field)).expect("Linux reports it");
    let kilobytes = line.split_whitespace().nth(1).expect("a number");
    kilobytes.parse::<u64>().expect("a number") * 1024
}
