//! Tests of the turns.
//!
//! promise: isolation

use std::pin::pin;

use futures_util::{FutureExt, future::join_all};
use proptest::prelude::*;

use super::*;

/// Lets each job request many turns of its cost at the same time, and returns the jobs of the
/// first `served` turns.
fn order(jobs: &[(u32, u64)], served: usize) -> Vec<usize> {
    let queue = Queue::new(1);
    let shares: Vec<Share> = jobs.iter().map(|_| queue.share()).collect();
    shares.iter().zip(jobs).for_each(|(share, (weight, _))| share.weigh(*weight));
    let first = queue.share();
    let busy = first.turn(0).now_or_never().unwrap();
    let order = Mutex::new(Vec::new());
    let turn = |job: usize| {
        let (shares, order) = (&shares, &order);
        async move {
            let _turn = shares[job].turn(jobs[job].1).await;
            order.lock().unwrap().push(job);
        }
    };
    let turns = (0..jobs.len()).flat_map(|job| (0..served).map(move |_| job)).map(turn);
    let mut all = pin!(join_all(turns));
    assert!(all.as_mut().now_or_never().is_none());
    drop(busy);
    while all.as_mut().now_or_never().is_none() {}
    let mut order = order.lock().unwrap().clone();
    order.truncate(served);
    order
}

fn count(order: &[usize], job: usize) -> usize {
    order.iter().filter(|of| **of == job).count()
}

#[test]
fn a_turn_is_taken_at_once_while_some_are_free() {
    let queue = Queue::new(2);
    let (one, other) = (queue.share(), queue.share());
    let first = one.turn(1).now_or_never().unwrap();
    let second = other.blocking_turn(1);
    assert!(!second.is_wanted());
    let mut third = pin!(one.turn(1));
    assert!(third.as_mut().now_or_never().is_none() && first.is_wanted());
    drop(second);
    assert!(third.now_or_never().is_some() && !first.is_wanted());
}

#[test]
fn jobs_with_the_same_weight_alternate_even_if_one_has_asked_first() {
    let order = order(&[(1, 10), (1, 10)], 20);
    assert!(order.chunks(2).all(|pair| count(pair, 0) == 1), "{order:?}");
}

#[test]
fn a_job_with_small_pieces_gets_as_many_bytes_as_one_with_large_pieces() {
    let order = order(&[(1, 100), (1, 10)], 55);
    assert!((4..=6).contains(&count(&order, 0)), "{order:?}");
}

#[test]
fn a_job_with_twice_the_weight_gets_twice_the_turns() {
    let order = order(&[(1, 10), (2, 10)], 30);
    assert!((9..=11).contains(&count(&order, 0)), "{order:?}");
}

#[test]
fn an_idle_job_does_not_save_up_turns() {
    let queue = Queue::new(1);
    let (busy, idle) = (queue.share(), queue.share());
    (0..1000).for_each(|_| drop(busy.turn(10).now_or_never().unwrap()));
    let running = busy.turn(10).now_or_never().unwrap();
    let mut waiting = [&idle, &idle, &busy].map(|share| Box::pin(share.turn(10)));
    assert!(waiting.iter_mut().all(|turn| turn.as_mut().now_or_never().is_none()));
    drop(running);
    let first = waiting[0].as_mut().now_or_never().unwrap();
    drop(first);
    assert!(waiting[1].as_mut().now_or_never().is_none());
    assert!(waiting[2].as_mut().now_or_never().is_some());
}

#[test]
fn the_turns_of_a_job_end_at_once_only_while_it_is_alone() {
    let queue = Queue::new(2);
    let (one, other) = (queue.share(), queue.share());
    let ends_at_once = |share: &Share| {
        let turn = share.turn(1).now_or_never().unwrap();
        end_after_others(turn).now_or_never().is_some()
    };
    for share in [&one, &other, &one] {
        assert!((0..ALONE).all(|_| !ends_at_once(share)));
        assert!((0..10).all(|_| ends_at_once(share)));
    }
    let running = other.turn(1).now_or_never().unwrap();
    assert!((0..100).all(|_| !ends_at_once(&one)));
    drop(running);
    assert!(ends_at_once(&one));
}

#[test]
fn a_job_is_ahead_while_it_receives_much_more_than_the_others_in_relation_to_its_weight() {
    let queue = Queue::new(1);
    let shares: [Share; 4] = std::array::from_fn(|_| queue.share());
    let serve = |costs: [u64; 4]| {
        for _ in 0..200 {
            for (share, cost) in shares.iter().zip(costs) {
                drop(share.turn(cost).now_or_never().unwrap());
            }
        }
        shares.each_ref().map(|share| queue.lock().is_ahead(share.flow))
    };
    let one = RECENT / 100;
    assert_eq!(serve([one; 4]), [false; 4]);
    assert_eq!(serve([one, one, one, 2 * one]), [false, false, false, true]);
    shares[3].weigh(2);
    assert_eq!(serve([one, one, one, 2 * one]), [false; 4]);
    // Jobs without turns do not count for long, and a job with few turns does.
    assert_eq!(serve([0, 0, one, 2 * one]), [false; 4]);
    shares[3].weigh(1);
    assert_eq!(serve([0, 0, one / 50, one]), [false, false, false, true]);
    assert_eq!(serve([0, 0, 0, one]), [false; 4]);
    drop(shares);
    assert_eq!(queue.lock().recent, 0);
}

#[test]
fn abandoned_turns_are_returned() {
    let queue = Queue::new(1);
    let (one, other) = (queue.share(), queue.share());
    let running = one.turn(1).now_or_never().unwrap();
    let mut given_up = Box::pin(other.turn(1));
    assert!(given_up.as_mut().now_or_never().is_none());
    let mut granted = Box::pin(other.turn(1));
    assert!(granted.as_mut().now_or_never().is_none());
    drop(given_up);
    drop(running);
    // The turn has begun, and its receiver has not been polled.
    drop(granted);
    assert!(one.turn(1).now_or_never().is_some());
    drop(other);
    assert!(one.turn(1).now_or_never().is_some());
}

#[test]
fn a_thread_waits_for_its_turn() {
    let queue = Queue::new(1);
    let (one, other) = (queue.share(), queue.share());
    let running = one.blocking_turn(1);
    std::thread::scope(|threads| {
        let waits = threads.spawn(|| drop(other.blocking_turn(1)));
        while !running.is_wanted() {
            std::thread::yield_now();
        }
        drop(running);
        waits.join().unwrap();
    });
    assert!(one.turn(1).now_or_never().is_some());
}

proptest! {
    /// The bound of start-time fair queuing: the amounts of service that two waiting jobs have
    /// received, each divided by the weight of the job, differ by at most the sum of the
    /// largest pieces of the two jobs, each divided by its weight.
    #[test]
    fn no_job_is_ahead_of_another_by_more_than_a_piece_of_each(
        jobs in prop::collection::vec((1u32..8, 1u64..50), 2..6),
    ) {
        let order = order(&jobs, 60);
        let got = |job: usize| count(&order, job) as f64 * jobs[job].1 as f64 / f64::from(jobs[job].0);
        let piece = |job: usize| jobs[job].1 as f64 / f64::from(jobs[job].0);
        for one in 0..jobs.len() {
            for other in 0..jobs.len() {
                let ahead = got(one) - got(other);
                prop_assert!(ahead <= piece(one) + piece(other) + 1e-6, "{one} {other} {order:?}");
            }
        }
    }
}
