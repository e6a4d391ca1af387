//! Memberships: the messages to each member, and their cost.
//!
//! promise: isolation

use super::*;
use crate::state::memberships::Peer;

fn join(script: &mut Script, rank: u32) -> Lease {
    script.join_as(rank, Some(format!("worker-{rank}:7"))).unwrap()
}

/// The peers in a message; ranks that have left are negative.
fn peers(told: Option<Change>) -> Option<Vec<i64>> {
    let rank = |peer: &Peer| {
        if peer.address.is_none() { -i64::from(peer.rank) } else { peer.rank.into() }
    };
    Some(told?.peers.iter().map(rank).collect())
}

#[test]
fn the_first_membership_is_complete_and_later_ones_contain_only_changes() {
    let mut script = Script::opened_job(spec(2), 2);
    let lease = script.join(0).unwrap();
    let first = script.told(lease).unwrap();
    assert_eq!((first.lease, first.epoch, first.world, first.job_id), (lease, 1, 2, JOB));
    assert!(first.spec.is_some() && first.version.is_none());
    let placement = first.placement.unwrap();
    assert_eq!(
        placement
            .servers()
            .iter()
            .map(|server| (server.id, server.incarnation))
            .collect::<Vec<_>>(),
        [(1, 1), (2, 1)]
    );
    assert!(script.told(lease).is_none(), "it knows everything");

    script.initialise_all();
    assert!(script.woken.contains(&lease));
    let later = script.told(lease).unwrap();
    assert_eq!((later.version, later.epoch, later.job_id), (Some(0), 1, JOB));
    assert!(later.spec.is_none() && later.placement.is_none() && later.peers.is_empty());
    assert!(script.told(lease).is_none());
}

#[test]
fn members_are_told_of_peers_that_join_and_leave() {
    let mut script = Script::opened_job(spec(5), 1);
    let quiet = script.join(1).unwrap();
    assert_eq!(peers(script.told(quiet)), Some(vec![]));
    let last = join(&mut script, 4);
    let first = join(&mut script, 2);
    assert_eq!(peers(script.told(quiet)), Some(vec![2, 4]));
    assert_eq!(peers(script.told(first)), Some(vec![2, 4]));
    assert_eq!(peers(script.told(last)), Some(vec![2, 4]));
    script.leave(last, false);
    assert_eq!(peers(script.told(quiet)), Some(vec![-4]));
    join(&mut script, 3);
    script.lose(2, first);
    assert_eq!(peers(script.told(quiet)), Some(vec![-2, 3]));
    let again = script.join_as(2, Some("elsewhere:1".into())).unwrap();
    assert_eq!(
        peers(script.told(again)),
        Some(vec![2, 3]),
        "a first message has those that are there"
    );
    let told = script.told(quiet).unwrap();
    assert_eq!(told.peers, [Peer { rank: 2, address: Some("elsewhere:1".into()) }]);
}

#[test]
fn a_worker_without_an_address_is_not_listed_as_a_peer() {
    let mut script = Script::opened_job(spec(2), 1);
    let lease = join(&mut script, 0);
    script.told(lease);
    script.woken.clear();
    let quiet = script.join(1).unwrap();
    assert_eq!(peers(script.told(quiet)), Some(vec![0]));
    assert!(script.woken.is_empty() && script.told(lease).is_none());
}

#[test]
fn a_step_sends_no_membership_message() {
    let (mut script, leases) = Script::training(1, 1);
    script.told(leases[0]);
    script.ready_all(0);
    script.woken.clear();
    script.commit(commit(leases[0], 1, 0, 0));
    assert_eq!(script.version(), Some(1));
    assert!(script.woken.is_empty() && script.told(leases[0]).is_none());
}

#[test]
fn a_slow_member_costs_no_memory_and_gets_one_message_with_the_latest_state() {
    let (mut script, leases) = Script::training(3, 1);
    script.told(leases[0]);
    let mut last = leases[2];
    for round in 0..10_000 {
        script.lose(2, last);
        last = script.join_as(2, Some(format!("worker-{round}:7"))).unwrap();
        script.commands.clear();
        script.woken.clear();
    }
    let open = script.open();
    // The bound is one entry for each rank that ever had an address, regardless of the number of
    // changes.
    assert_eq!(open.peers.len(), 1);
    assert_eq!(open.members.len(), 3);
    let told = script.told(leases[0]).unwrap();
    assert_eq!(told.epoch, 10_001);
    assert_eq!(told.peers, [Peer { rank: 2, address: Some("worker-9999:7".into()) }]);
    assert!(told.spec.is_none() && told.placement.is_none());
    assert!(script.told(leases[0]).is_none());
}

#[test]
fn a_thousand_joins_send_each_worker_one_placement_and_a_peer_for_each_other_worker() {
    const WORKERS: u32 = 1000;
    let mut script = Script::opened_job(spec(WORKERS), 4);
    let mut leases = Vec::new();
    let mut placements = 0;
    for rank in 0..WORKERS {
        leases.push(script.join_as(rank, Some(format!("worker-{rank}:7"))).unwrap());
        script.woken.clear();
        script.commands.clear();
        // All members read all messages, which is the maximum number of messages.
        for &lease in &leases {
            let told = script.told(lease).expect("a peer came");
            assert_eq!(told.placement.is_some(), told.spec.is_some());
            placements += usize::from(told.placement.is_some());
            if told.placement.is_none() {
                assert_eq!(told.peers.len(), 1);
            }
        }
    }
    assert_eq!(placements, WORKERS as usize);
}
