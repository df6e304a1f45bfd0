package scenarios

import "mailproof/faults"

// kafkaLost kills the broker under load, and makes the bridge share its group.
func kafkaLost() Scenario {
	s := partScenario("part-kafka", "Kafka is killed and comes back; a stranger joins the bridge's group and leaves",
		"kafka-killed", "kafka-rebalance")
	s.Proves = []string{"A2-01", "A2-03", "A2-04", "LAB-T4"}
	s.Judge = judgeParts("kafka-killed")
	s.Faults = func(b *Bench) []faults.Fault {
		return b.inTurn(
			faults.ServerKilled("kafka-killed", b.Parts.Stack.Kafka(), outage, faults.KafkaRefuses(b.Parts.Brokers)),
			faults.StrangerInGroup(b.Parts.Brokers, b.Parts.Topic, b.Parts.Group, outage),
		)
	}
	return s
}
