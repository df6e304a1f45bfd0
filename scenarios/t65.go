package scenarios

import "mailproof/faults"

// leaderLost is T6.5: the RabbitMQ node that leads the ticket queue dies and
// comes back; then the leader of that moment is cut off from its peers, steps
// aside as a minority, and joins again. Nothing that was confirmed may be lost
// with either.
func leaderLost() Scenario {
	s := partScenario("t6.5", "the leader of the ticket queue is killed, then cut off from its peers",
		"rabbitmq-leader-killed", "rabbitmq-leader-cut-off")
	s.Proves = []string{"T6.5", "M6-12", "TRAP-M6-5", "AC2"}
	s.Faults = func(b *Bench) []faults.Fault {
		return b.inTurn(faults.LeaderKilled(b.cluster(), outage), faults.LeaderCutOff(b.cluster(), outage))
	}
	return s
}
