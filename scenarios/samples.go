package scenarios

import (
	"fmt"
	"path/filepath"

	"mailproof/history"
	"mailproof/loadgen"
	"mailproof/verify"
)

// samplesOf is one sample for each mail that was asked for and not cancelled:
// from the intended time of the first acknowledged request to the server's first
// positive answer and to the commit of SENT. A mail that was cancelled and is not
// delivered is nobody's latency.
func samplesOf(e *verify.Evidence) []loadgen.Sample {
	var samples []loadgen.Sample
	for _, key := range e.Keys {
		m := e.Mails[key]
		asked := firstAcknowledged(m)
		if asked == nil || m.MayBeCancelled() && !m.Delivered() {
			continue
		}
		s := loadgen.Sample{Kind: "ticket", Key: key, Intended: asked.Intended, Accepted: acceptedAt(m), Sent: sentAt(m)}
		if m.Campaign != "" {
			s.Kind = "campaign"
		}
		samples = append(samples, s)
	}
	return samples
}

func firstAcknowledged(m *verify.Mail) *history.Op {
	for _, o := range m.Ops {
		if (o.Name == "confirm" || o.Name == "reopen" || o.Name == "campaign") && o.Outcome == history.OpOK {
			return o
		}
	}
	return nil
}

func acceptedAt(m *verify.Mail) int64 {
	for _, a := range m.Attempts { // by first byte; the first that was stored was answered first
		if a.Stored {
			return a.To
		}
	}
	return 0
}

func sentAt(m *verify.Mail) int64 {
	for i := range m.Moves {
		if mv := &m.Moves[i]; mv.To == "SENT" && mv.From != "SENT" {
			return mv.At
		}
	}
	return 0
}

// ticketLatency is that of the tickets whose confirmation was intended in [from,
// to). A latency that no clock can have is a finding.
func ticketLatency(own *ownFindings, from, to int64) lanes {
	l := lanes{accepted: loadgen.NewLatency(), sent: loadgen.NewLatency()}
	for _, s := range own.samples {
		if s.Kind != "ticket" || s.Intended < from || s.Intended >= to {
			continue
		}
		for _, one := range []struct {
			of *loadgen.Latency
			at int64
		}{{l.accepted, s.Accepted}, {l.sent, s.Sent}} {
			if err := one.of.Record(s.Since(one.at)); err != nil {
				own.find(verify.HarnessError, "samples", s.Key, err.Error())
			}
		}
	}
	return l
}

// measureLatency adds the figures of a distribution; ∞ is written as -1, as in
// the judge's own.
func (o *ownFindings) measureLatency(name string, l *loadgen.Latency) {
	s, p95 := l.Summary(), -1.0
	if s.P95 != loadgen.Never {
		p95 = loadgen.Milliseconds(s.P95)
	}
	o.measure(name+", p95", p95, "ms", s.String())
}

// saveSamples keeps the raw samples beside the history that they were taken
// from.
func (o *ownFindings) saveSamples(dir string) error {
	if len(o.samples) == 0 {
		return nil
	}
	if err := loadgen.WriteSamples(filepath.Join(dir, loadgen.SamplesFile), o.samples); err != nil {
		return fmt.Errorf("raw samples: %w", err)
	}
	return nil
}
