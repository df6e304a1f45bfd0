package scenarios

import "mailproof/faults"

// rabbitMQ breaks the cluster in the ways that T6.5 does not: a node that leads
// nothing, two nodes of three, a memory alarm, and consumers that the broker
// cancels.
func rabbitMQ() Scenario {
	const majority = "rabbitmq-majority-killed"
	s := partScenario("part-rabbitmq", "RabbitMQ loses a follower, then its majority, blocks publishers, moves a leader, cancels consumers",
		"rabbitmq-follower-killed", majority, "rabbitmq-publishers-blocked", "rabbitmq-leader-moved", "rabbitmq-consumers-cancelled")
	s.Proves = []string{"M6-08", "A2-10", "A2-16"}
	// A cancelled consumer is back within milliseconds: too soon to be seen red.
	s.Judge = judgeParts(majority)
	s.Faults = func(b *Bench) []faults.Fault {
		c := b.cluster()
		return b.inTurn(
			faults.FollowerKilled(c, outage),
			faults.MajorityKilled(c, faults.For(outage)),
			faults.PublishersBlocked(c, outage),
			faults.LeaderMoved(c),
			faults.ConsumersCancelled(c),
		)
	}
	return s
}
