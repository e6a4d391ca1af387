//! Jobs are admitted by the memory and by the number that the cluster can hold.
//!
//! promise: isolation

use super::*;

/// A job of one trained tensor, which needs 16 bytes for each element.
fn sized(name: &str, numel: u64) -> JobSpec {
    let manifest = Manifest::new(vec![TensorSpec::new("w", [numel])]).unwrap();
    JobSpec::new(name, manifest, vec!["adamw".parse().unwrap()])
}

/// Servers with the ids 1, 2, ..., each with this number of bytes.
fn servers(bytes: &[u64]) -> Script {
    let mut script = Script::default();
    for (id, &bytes) in (1..).zip(bytes) {
        let server = Server { id, incarnation: 1, address: format!("host:{id}") };
        script.server_with(server, Some(Capacity { bytes, memory: bytes }));
    }
    script
}

impl Script {
    /// The result of the creation of a job, whose servers open it.
    fn admit(&mut self, id: u64, spec: JobSpec) -> Result<Reply> {
        let caller = self.create_as(id, spec.clone());
        if let Some(placement) = self.cluster.jobs().get(&spec.name).and_then(|job| {
            let phase = &job.phase;
            phase.placement().map(|placement| (placement.servers().to_vec(), job.epoch))
        }) {
            let job = JobRef { name: spec.name, id };
            for server in placement.0 {
                self.said(server.id, ServerEvent::Opened { job: job.clone(), epoch: placement.1 });
            }
        }
        self.answers.remove(&caller).expect("it is answered")
    }
}

/// The bytes that are needed and free, and the text about the servers.
fn shortage(refused: Result<Reply>) -> (u64, u64, String) {
    match refused {
        Err(Error::InsufficientMemory { bytes, free, servers, .. }) => (bytes, free, servers),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_job_that_does_not_fit_is_refused_with_the_numbers_and_takes_nothing() {
    let mut script = servers(&[1000, 2000]);
    let refused = shortage(script.admit(1, sized("large", 188)));
    assert_eq!(refused, (3008, 3000, "host:1: 1000 of 1000, host:2: 2000 of 2000".to_owned()));
    assert!(script.cluster.jobs().is_empty());
    let is_welcome = |(_, command): &(u64, Command)| matches!(command, Command::Welcome);
    assert!(script.commands.iter().all(is_welcome), "nothing was allocated");
}

#[test]
fn jobs_count_until_they_are_deleted() {
    let mut script = servers(&[1000]);
    script.admit(1, sized("one", 40)).unwrap();
    assert_eq!(shortage(script.admit(2, sized("two", 40))).1, 360);
    script.admit(3, sized("three", 22)).unwrap();
    let caller = script.caller();
    let job = JobRef { name: "one".to_owned(), id: 1 };
    script.event(Event::Delete { caller, job, wait: WAIT });
    script.admit(4, sized("two", 40)).unwrap();
}

#[test]
fn slices_are_on_the_servers_that_have_room_for_them() {
    // The tensors are balanced by bytes, unless that does not fit.
    let tensors = (0..6).map(|index| TensorSpec::new(format!("t{index}"), [10]));
    let manifest = Manifest::new(tensors.collect()).unwrap();
    let spec = JobSpec::new("job", manifest, vec!["adamw".parse().unwrap()]);
    let mut script = servers(&[200, 900]);
    script.admit(1, spec.clone()).unwrap();
    let loads = script.cluster.common.index.assigned();
    assert_eq!([1, 2].map(|server| loads[&server].bytes), [160, 800]);
    let two = JobSpec { replicas: 2, min_servers: 2, ..spec };
    let (bytes, free, text) = shortage(servers(&[400, 2000]).admit(1, two));
    assert_eq!((bytes, free), (1920, 2400));
    assert!(text.contains("no server has room for a further slice of 160 bytes"), "{text}");
}

#[test]
fn what_must_be_in_memory_does_not_fit_on_a_disk() {
    let mut script = Script::default();
    let server = Server { id: 1, incarnation: 1, address: "host:1".to_owned() };
    script.server_with(server, Some(Capacity { bytes: 10_000, memory: 100 }));
    let half = TensorSpec { dtype: DType::Bf16, ..TensorSpec::new("w", [60]) };
    let spec = JobSpec { manifest: Manifest::new(vec![half]).unwrap(), ..sized("half", 1) };
    let (_, _, text) = shortage(script.admit(1, spec));
    assert!(text.contains("120 bytes can only be in the memory"), "{text}");
    script.admit(2, sized("full", 60)).unwrap();
}

#[test]
fn a_server_without_a_known_limit_takes_any_job() {
    let mut script = servers(&[10]);
    script.server(2);
    script.admit(1, sized("large", 1 << 20)).unwrap();
}

#[test]
fn a_new_coordinator_knows_what_the_jobs_need() {
    let before = recovery::Before::new();
    let script = before.recover([before.report(), before.report()]);
    let needed: u64 = script.cluster.common.index.assigned().values().map(|load| load.bytes).sum();
    assert_eq!(needed, before.spec.required().bytes);
}

#[test]
fn further_jobs_than_the_limit_are_refused_until_one_is_deleted() {
    let mut script = servers(&[1 << 20]);
    script.cluster.common.limits.number = 2;
    for id in 1..=2 {
        script.admit(id, sized(&format!("job {id}"), 1)).unwrap();
    }
    let refused = script.admit(3, sized("job 3", 1));
    assert!(matches!(refused, Err(Error::LimitExceeded { limit: 2, .. })), "{refused:?}");
    script.admit(4, sized("job 2", 1)).unwrap();
    let caller = script.caller();
    let job = JobRef { name: "job 1".to_owned(), id: 1 };
    script.event(Event::Delete { caller, job, wait: WAIT });
    script.admit(5, sized("job 3", 1)).unwrap();
}
