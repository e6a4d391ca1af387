//! Tests of the collectives on several ranks.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use zeroshard_model::{Error as ClusterError, Reduction};
use zeroshard_net::Token;

use super::testing::{connect, runtime, together, with_deadline};
use super::{Collectives, Error, Listening, Options, Peers};

/// Enough elements for the ring, and not a multiple of the number of ranks.
const MANY: usize = 100_003;

/// Values whose sum depends on the order.
fn values(rank: u32, count: usize) -> Vec<f32> {
    let value = |i: usize| (i * 7919 + rank as usize * 104_729 + 1) % 2003;
    (0..count).map(|i| (value(i) as f32 / 1001.5 - 1.0) * 10f32.powi((i % 7) as i32 - 3)).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn group(world: usize) -> Vec<u32> {
    (0..world as u32).collect()
}

/// The sums of the values of all ranks and of their magnitudes, in f64.
fn exact(world: usize, count: usize) -> Vec<(f64, f64)> {
    let mut sums = vec![(0.0, 0.0); count];
    for rank in group(world) {
        for (sum, value) in sums.iter_mut().zip(values(rank, count)) {
            *sum = (sum.0 + f64::from(value), sum.1 + f64::from(value.abs()));
        }
    }
    sums
}

fn assert_close(found: &[f32], expected: &[(f64, f64)]) {
    assert_eq!(found.len(), expected.len());
    for (found, (expected, magnitude)) in found.iter().zip(expected) {
        assert!((f64::from(*found) - expected).abs() <= 1e-6 * magnitude, "{found}, {expected}");
    }
}

#[test]
fn an_all_reduce_is_the_sum_and_the_same_bits_on_every_rank() {
    for world in [1, 2, 3, 5] {
        for count in [0, 1, 2, 10, MANY] {
            let sums = together(world, |peers| {
                peers
                    .all_reduce(&group(world), Reduction::Sum, values(peers.rank(), count))
                    .unwrap()
            });
            assert_close(&sums[0], &exact(world, count));
            assert!(
                sums.iter().all(|sum| bits(sum) == bits(&sums[0])),
                "{world} ranks, {count} elements"
            );
        }
    }
}

#[test]
fn an_all_to_all_gives_each_rank_the_parts_for_it() {
    for world in [1, 2, 3, 5] {
        // Rank i sends so many elements to rank j; none from rank 1 to rank 0.
        let count = |from: usize, to: usize| from * 5 + to * 3 - if from == 1 { 5 } else { 0 };
        let part = |from: usize, to: usize| values((from * world + to) as u32, count(from, to));
        let received = together(world, |peers| {
            let me = peers.rank() as usize;
            let parts = (0..world).map(|to| part(me, to)).collect();
            let sizes: Vec<usize> = (0..world).map(|from| count(from, me)).collect();
            peers.all_to_all(&group(world), &sizes, parts).unwrap()
        });
        for (me, received) in received.into_iter().enumerate() {
            let expected: Vec<_> = (0..world).map(|from| part(from, me)).collect();
            assert_eq!(received, expected, "rank {me} of {world}");
        }
    }
}

#[test]
fn ring_and_direct_give_the_same_bits() {
    let world = 3;
    let all_reduce = || {
        let reduced = together(world, |peers| {
            peers.all_reduce(&group(world), Reduction::Sum, values(peers.rank(), MANY)).unwrap()
        });
        reduced.into_iter().next().unwrap()
    };
    let ring = all_reduce();
    assert_eq!(bits(&ring), bits(&all_reduce()), "the result does not depend on timing");
    // Each piece of the ring's result is compared with a direct reduction of that piece alone.
    let piece = MANY.div_ceil(world);
    for place in 0..world {
        let of_piece =
            |values: Vec<f32>| values[piece * place..(piece * (place + 1)).min(MANY)].to_vec();
        let direct = together(world, |peers| {
            let (mine, rank) = (of_piece(values(peers.rank(), MANY)), peers.rank() as usize);
            let mut parts = vec![Vec::new(); world];
            parts[place] = mine;
            let sum = peers.reduce_scatter(&group(world), Reduction::Sum, parts).unwrap();
            (rank == place).then_some(sum)
        });
        let direct = direct.into_iter().flatten().next().unwrap();
        assert_eq!(bits(&direct), bits(&of_piece(ring.clone())), "piece {place}");
    }
}

#[test]
fn mean_and_maximum_are_those_of_all_ranks() {
    for count in [5, MANY] {
        let world = 3;
        let both = together(world, |peers| {
            let reduce =
                |how| peers.all_reduce(&group(world), how, values(peers.rank(), count)).unwrap();
            (reduce(Reduction::Avg), reduce(Reduction::Max))
        });
        let world_size = world as f64;
        let mean = exact(world, count)
            .into_iter()
            .map(|(sum, size)| (sum / world_size, size / world_size));
        let mean: Vec<_> = mean.collect();
        let largest: Vec<f32> = (0..count)
            .map(|i| {
                group(world).iter().map(|&rank| values(rank, count)[i]).fold(f32::MIN, f32::max)
            })
            .take(5)
            .collect();
        for (average, maximum) in both {
            assert_close(&average, &mean);
            assert_eq!(maximum[..5], largest);
        }
    }
}

#[test]
fn a_nan_is_the_maximum() {
    let world = 2;
    for maximum in together(world, |peers| {
        let mine = if peers.rank() == 0 { vec![f32::NAN, 1.0] } else { vec![1.0, f32::NAN] };
        peers.all_reduce(&group(world), Reduction::Max, mine).unwrap()
    }) {
        assert!(maximum.iter().all(|value| value.is_nan()));
    }
}

#[test]
fn parts_of_any_size_are_gathered_in_the_groups_order() {
    for sizes in [[3, 0, 2], [70_000, 0, 30_000]] {
        let order = [2, 0, 1];
        let gathered = together(3, |peers| {
            let place = order.iter().position(|&rank| rank == peers.rank()).unwrap();
            peers.all_gather(&order, &sizes, values(peers.rank(), sizes[place])).unwrap()
        });
        for parts in gathered {
            let expected: Vec<_> =
                order.iter().zip(sizes).map(|(&rank, size)| values(rank, size)).collect();
            assert_eq!(parts, expected);
        }
    }
}

#[test]
fn parts_of_any_size_are_reduced_and_scattered() {
    for sizes in [[3, 0, 2], [70_000, 0, 30_000]] {
        let scattered = together(3, |peers| {
            let mut rest = values(peers.rank(), sizes.iter().sum());
            let parts = sizes.map(|size| rest.drain(..size).collect());
            peers.reduce_scatter(&group(3), Reduction::Sum, parts.to_vec()).unwrap()
        });
        assert_close(&scattered.concat(), &exact(3, sizes.iter().sum()));
    }
}

#[test]
fn messages_between_two_ranks_keep_their_order() {
    let received = together(2, |peers| match peers.rank() {
        0 => {
            (0..20).for_each(|i| peers.send(1, vec![i as f32; i]).unwrap());
            Vec::new()
        }
        _ => (0..20).map(|i| peers.recv(0, i).unwrap()).collect(),
    });
    assert_eq!(received[1], (0..20).map(|i| vec![i as f32; i]).collect::<Vec<_>>());
}

#[test]
fn groups_do_not_disturb_each_other() {
    let found = together(4, |peers| {
        let (rank, one) = (peers.rank(), vec![peers.rank() as f32]);
        let row = if rank < 2 { [0, 1] } else { [2, 3] };
        let column = [rank % 2, rank % 2 + 2];
        let first = peers.all_reduce(&row, Reduction::Sum, one.clone()).unwrap()[0];
        let second = peers.all_reduce(&column, Reduction::Sum, one.clone()).unwrap()[0];
        (first, second, peers.all_reduce(&group(4), Reduction::Sum, one).unwrap()[0])
    });
    assert_eq!(found, [(1.0, 2.0, 6.0), (1.0, 4.0, 6.0), (5.0, 2.0, 6.0), (5.0, 4.0, 6.0)]);
}

#[test]
fn a_disagreement_about_sizes_names_both_sizes() {
    let errors = together(2, |peers| {
        let count = 10 + peers.rank() as usize;
        peers.all_reduce(&group(2), Reduction::Sum, vec![0.0; count]).unwrap_err()
    });
    for (error, (ours, theirs)) in
        errors.iter().zip([("of 10 f32", "of 11 f32"), ("of 11 f32", "of 10 f32")])
    {
        let Error::Disagreement { at, theirs: call } = error else { panic!("{error}") };
        assert!(at.operation.contains(ours) && call.contains(theirs), "{error}");
    }
}

#[test]
fn a_disagreement_about_operations_names_both_operations() {
    let errors = together(2, |peers| match peers.rank() {
        0 => peers.all_reduce(&group(2), Reduction::Sum, vec![0.0]).unwrap_err(),
        _ => peers.all_gather(&group(2), &[1, 1], vec![0.0]).unwrap_err(),
    });
    assert!(
        errors.iter().any(|error| matches!(error, Error::Disagreement { at, theirs }
            if format!("{} {theirs}", at.operation).contains("all_reduce")
                && format!("{} {theirs}", at.operation).contains("all_gather"))),
        "{errors:?}"
    );
}

#[test]
fn agree_fails_if_the_texts_differ() {
    for same in [true, false] {
        let results = together(3, |peers| {
            let text = if same || peers.rank() != 1 {
                "fc1: ColwiseParallel"
            } else {
                "fc1: RowwiseParallel"
            };
            peers.agree(&group(3), "the plan", text)
        });
        if same {
            assert_eq!(results, vec![Ok(()); 3]);
            continue;
        }
        let Err(Error::Disagreement { at, theirs }) = &results[0] else { panic!("{results:?}") };
        assert!(
            at.operation.contains("Colwise") && theirs.contains("Rowwise") && at.peer == 1,
            "{results:?}"
        );
    }
}

#[test]
fn a_timeout_names_the_peer_and_the_operation() {
    let timed_out = Barrier::new(2);
    let results = with_deadline(2, Duration::from_secs(1), |peers| {
        let error = match peers.rank() {
            0 => Some(peers.all_reduce(&group(2), Reduction::Sum, vec![0.0; 7]).unwrap_err()),
            _ => {
                peers.send(0, vec![1.0]).unwrap();
                None
            }
        };
        timed_out.wait();
        error
    });
    let Some(Error::Timeout { at, waited_ms: 1000, instead }) = &results[0] else {
        panic!("{results:?}")
    };
    assert_eq!((at.rank, at.peer, at.group.as_slice()), (0, 1, [0, 1].as_slice()));
    assert!(at.operation.contains("all_reduce(sum) of 7 f32"), "{at}");
    assert!(instead.as_ref().is_some_and(|other| other.contains("send of 1 f32")), "{instead:?}");
}

#[test]
fn a_wait_for_a_rank_that_leaves_fails_at_once() {
    let begin = Instant::now();
    let results = together(2, |peers| match peers.rank() {
        0 => Some(peers.recv(1, 1).unwrap_err()),
        _ => None,
    });
    assert!(matches!(&results[0], Some(Error::Lost { at, .. }) if at.peer == 1), "{results:?}");
    assert!(begin.elapsed() < Duration::from_secs(30));
}

#[test]
fn a_failure_of_a_rank_ends_the_waits_for_it() {
    // Rank 2 waits for rank 1, which disagrees with rank 0.
    let begin = Instant::now();
    let errors = together(3, |peers| match peers.rank() {
        0 => peers.all_reduce(&[0, 1], Reduction::Sum, vec![0.0]).unwrap_err(),
        1 => {
            let first = peers.all_reduce(&[0, 1], Reduction::Sum, vec![0.0; 2]).unwrap_err();
            let later = peers.send(2, vec![1.0]).unwrap_err();
            assert_eq!(later, first, "later operations return the first error");
            first
        }
        _ => peers.recv(1, 1).unwrap_err(),
    });
    assert!(matches!(&errors[2], Error::Lost { at, .. } if at.peer == 1), "{}", errors[2]);
    assert!(begin.elapsed() < Duration::from_secs(30));
}

#[test]
fn invalid_groups_and_ranks_are_refused_without_a_failure() {
    together(2, |peers| {
        for wrong in [vec![], vec![0, 0, 1], vec![1 - peers.rank()], vec![0, 1, 2]] {
            let error = peers.all_reduce(&wrong, Reduction::Sum, vec![]).unwrap_err();
            assert!(
                matches!(error, Error::Cluster(ClusterError::Refused { .. })),
                "{wrong:?}: {error}"
            );
        }
        assert!(peers.send(peers.rank(), vec![]).is_err());
        assert!(peers.recv(2, 0).is_err());
        assert!(peers.all_gather(&group(2), &[1, 1], vec![]).is_err());
        assert!(peers.reduce_scatter(&group(2), Reduction::Sum, vec![vec![]]).is_err());
        assert_eq!(peers.all_reduce(&group(2), Reduction::Sum, vec![1.0]).unwrap(), [2.0]);
    });
}

#[test]
fn a_peer_with_the_wrong_rank_is_refused() {
    let runtime = runtime();
    let options = || Options { deadline: Duration::from_secs(2), ..Options::default() };
    let bind = || Listening::bind(runtime.handle(), options()).unwrap();
    let (one, other) = (bind(), bind());
    let [first, second] = [&one, &other].map(|listening| listening.address().to_string());
    // Each worker regards itself as rank 0 and the other one as rank 1.
    let addresses = [[first.clone(), second.clone()], [second, first]];
    let errors = std::thread::scope(|scope| {
        let one = scope.spawn(|| connect(one, 0, &addresses[0]).map(drop).unwrap_err());
        [connect(other, 0, &addresses[1]).map(drop).unwrap_err(), one.join().unwrap()]
    });
    // When the first worker is refused, it may end before the second one connects to it.
    let refused = |error: &Error| matches!(error, Error::Cluster(ClusterError::Refused { .. }));
    assert!(errors.iter().any(refused), "{errors:?}");
}

#[test]
fn a_peer_that_does_not_answer_is_named() {
    let runtime = runtime();
    let options = Options { deadline: Duration::from_millis(200), ..Options::default() };
    let one = Listening::bind(runtime.handle(), options).unwrap();
    let addresses = [one.address().to_string(), "127.0.0.1:1".to_owned()];
    let error = connect(one, 0, &addresses).unwrap_err();
    assert!(error.to_string().contains("rank 1 at 127.0.0.1:1"), "{error}");
}

#[test]
fn only_calls_with_the_token_are_answered() {
    let runtime = runtime();
    let bind = |token: &str| {
        let token = Token::from(token.to_owned());
        Listening::bind(
            runtime.handle(),
            Options { token, deadline: Duration::from_secs(5), ..Options::default() },
        )
        .unwrap()
    };
    let (one, other) = (bind("s3cret"), bind("another"));
    let addresses = [one.address().to_string(), other.address().to_string()];
    let error = connect(one, 0, &addresses).unwrap_err();
    assert!(matches!(error, Error::Cluster(ClusterError::Unauthenticated { .. })), "{error}");
}

#[test]
fn operations_of_duplicates_are_not_ordered_among_each_other() {
    let results = together(2, |peers| {
        let other = peers.duplicate();
        let reduce = |by: &Peers, value| by.all_reduce(&[0, 1], Reduction::Sum, vec![value; 9]);
        if peers.rank() == 0 {
            let two = reduce(&other, 10.0);
            return (reduce(peers, 1.0), two);
        }
        // The other order: the first operation ends after the second.
        thread::scope(|scope| {
            let one = scope.spawn(|| reduce(peers, 2.0));
            let two = reduce(&other, 20.0);
            (one.join().unwrap(), two)
        })
    });
    let results: Vec<_> =
        results.into_iter().map(|(one, two)| (one.unwrap(), two.unwrap())).collect();
    assert_eq!(results, vec![(vec![3.0; 9], vec![30.0; 9]); 2]);
}
