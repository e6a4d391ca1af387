//! Calls that are answered when the servers have received the commands.

use super::*;

impl Script {
    /// The servers confirm the commands that they were sent so far.
    fn confirm(&mut self, server: u64) {
        let number = |(id, command): &(u64, Command)| match command {
            Command::Confirm { number } if *id == server => Some(*number),
            _ => None,
        };
        let numbers: Vec<u64> = self.commands.iter().filter_map(number).collect();
        for number in numbers {
            self.said(server, ServerEvent::Confirmed { number });
        }
    }

    /// Checks that `caller` is answered when both servers have confirmed.
    fn is_answered_by_both(&mut self, caller: Caller) {
        assert_eq!(self.answer(caller), None);
        self.confirm(1);
        assert_eq!(self.answer(caller), None);
        self.confirm(2);
        assert!(matches!(self.answer(caller), Some(Ok(_))), "{:?}", self.answer(caller));
    }
}

fn silent() -> (Script, Vec<Lease>) {
    let (mut script, leases) = Script::training_of(JobSpec { min_servers: 2, ..spec(2) }, 2);
    script.silent = true;
    (script, leases)
}

#[test]
fn a_deletion_is_answered_when_the_servers_know_it() {
    let (mut script, _) = silent();
    let caller = script.delete(JOB);
    assert_eq!(script.closed(), [1, 2]);
    script.is_answered_by_both(caller);
    let again = script.delete(JOB);
    assert_eq!(script.error(again), &Error::UnknownJob { job: "job".into() });
}

#[test]
fn a_departure_is_answered_when_the_servers_know_it() {
    let (mut script, leases) = silent();
    let caller = script.leave(leases[1], false);
    script.is_answered_by_both(caller);
    // A repeated call waits for them as well.
    let caller = script.leave(leases[1], false);
    script.is_answered_by_both(caller);
}

#[test]
fn a_new_attempt_is_answered_when_the_servers_know_it() {
    let (mut script, leases) = silent();
    let epoch = script.epoch();
    let turns = [0, 1].map(|rank| turn(leases[rank as usize], epoch, rank, 0));
    let callers = turns.clone().map(|turn| script.discard(turn));
    script.is_answered_by_both(callers[0]);
    assert_eq!(script.answer(callers[1]), Some(&Ok(Reply::Discarded { attempt: 1 })));
    let again = script.discard(turns[0].clone());
    script.is_answered_by_both(again);
    let mut next = turns;
    next.iter_mut().for_each(|turn| turn.attempt.number = 1);
    let callers = next.map(|turn| script.rest(turn, false));
    script.is_answered_by_both(callers[1]);
}

#[test]
fn a_server_that_is_lost_or_silent_is_not_waited_for_forever() {
    let (mut script, leases) = silent();
    let caller = script.leave(leases[0], false);
    script.confirm(1);
    script.lose_link(script.links[&2]);
    assert_eq!(script.answer(caller), Some(&Ok(Reply::Left)));

    let (mut script, _) = silent();
    let caller = script.delete(0);
    script.confirm(2);
    script.after(WAIT);
    let Error::Timeout { waiting_for, .. } = script.error(caller) else { panic!("a timeout") };
    assert_eq!(waiting_for, "shard server host:1 to receive the deletion of job \"job\"");
    assert_eq!(script.cluster.next_deadline(), None);
}
