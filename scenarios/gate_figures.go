package scenarios

import (
	"fmt"
	"slices"
	"strings"

	"mailproof/history"
	"mailproof/reports"
)

// What the lines of the gate say, from the cells alone.

func (c Cells) first() reports.Scenario {
	if len(c.list) == 0 {
		return reports.Scenario{}
	}
	return c.list[0]
}

// strikes is how often a fault struck, in all cells.
func (c Cells) strikes(fault string) int {
	n := 0
	for _, cell := range c.list {
		for _, f := range cell.Faults {
			if f.Name == fault {
				n += f.Count
			}
		}
	}
	return n
}

// struckTooRarely says of a fault that it struck fewer times than it must, in one
// of the cells; "" when it did often enough. One strike is a witness, and no
// test.
func (c Cells) struckTooRarely(fault string, floor int) string {
	for _, cell := range c.list {
		n := 0
		for _, f := range cell.Faults {
			if f.Name == fault {
				n += f.Count
			}
		}
		if n < floor {
			return fmt.Sprintf("%s/%s: %s struck %d times, the floor is %d", cell.Name, cell.Policy, fault, n, floor)
		}
	}
	return ""
}

// witness is what the far side saw of a fault.
func (c Cells) witness(fault string) string {
	for _, f := range c.first().Faults {
		if f.Name == fault {
			return f.Witness
		}
	}
	return ""
}

// measured is a figure that the first cell took, 0 if it did not.
func (c Cells) measured(name string) float64 {
	for _, m := range c.first().Measured {
		if m.Name == name {
			return m.Value
		}
	}
	return 0
}

// once tells what became of the mails.
func (c Cells) once() string {
	n := c.first().Counts
	return fmt.Sprintf("%d of %d mails delivered, %d copies more, %d lost", n.Delivered, n.Confirmed, n.Duplicates, n.Lost)
}

// lost tells what became of the mails, cell by cell.
func (c Cells) lost() string {
	parts := make([]string, len(c.list))
	for i, cell := range c.list {
		n := cell.Counts
		parts[i] = fmt.Sprintf("%s %d of %d delivered, %d copies more, %d UNKNOWN, %d lost", cell.Policy, n.Delivered, n.Confirmed, n.Duplicates, n.Unknown, n.Lost)
	}
	return strings.Join(parts, "; ")
}

func (c Cells) givenUp() string {
	cell := c.first()
	letters := 0
	for _, q := range cell.Queues {
		if strings.HasSuffix(q.Name, "dlq") {
			letters += q.Messages
		}
	}
	return fmt.Sprintf("%.3g tries per mail (%d allowed) at %s, then %d of %d DEAD, %d dead letters",
		c.measured("tries per mail"), cell.MaxAttempts, durations(cell.RetryDelays), cell.Counts.Dead, cell.Counts.Confirmed, letters)
}

func (c Cells) idling() string {
	return fmt.Sprintf("%s %.1f %% of a core with the server down, %.1f %% idle (< %d %%); %.3g deliveries per mail",
		mailService, c.measured(downCPU), c.measured(idleCPU), maxCPU, c.measured("deliveries per mail"))
}

// mainQueues are the two main queues and the dead-letter queue as M6-03 and M6-04
// name them.
func mainQueues() []string { return []string{"q.notify.ticket", "q.notify.marketing", "q.notify.dlq"} }

func (c Cells) queuesMissing() string {
	for _, name := range mainQueues() {
		if !slices.ContainsFunc(c.first().Queues, func(q history.QueueState) bool { return q.Name == name }) {
			return "the broker listed no queue " + name
		}
	}
	return ""
}

// queueTypes tells the main queues as the broker listed them, and how many others
// were looked at.
func (c Cells) queueTypes() string {
	var words []string
	for _, name := range mainQueues() {
		for _, q := range c.first().Queues {
			if q.Name == name {
				words = append(words, fmt.Sprintf("%s %s, %d members, leader %s", q.Name, q.Type, q.Members, q.Leader))
			}
		}
	}
	quorum, all := 0, 0
	for _, cell := range append(slices.Clone(c.list), c.others...) {
		for _, q := range cell.Queues {
			all++
			if q.Type == "quorum" {
				quorum++
			}
		}
	}
	return fmt.Sprintf("%s; %d of %d queues of the run are quorum queues", strings.Join(words, "; "), quorum, all)
}

// milliseconds writes a figure in its unit; -1 stands for a mail that never came.
func milliseconds(ms float64) string {
	switch {
	case ms < 0:
		return "∞"
	case ms < 1000:
		return fmt.Sprintf("%.0f ms", ms)
	default:
		return fmt.Sprintf("%.2f s", ms/1000)
	}
}
