package benchmarks

// Names of the layouts.
const (
	layoutIdle     = "idle"
	layoutSplit    = "split"
	layoutOnePool  = "one-pool"
	layoutOneQueue = "one-queue"
)

// layout by its name, nil when it was not measured.
func (l *Latency) layout(name string) *Layout {
	if l == nil {
		return nil
	}
	for i := range l.Layouts {
		if l.Layouts[i].Name == name && len(l.Layouts[i].Repeats) > 0 {
			return &l.Layouts[i]
		}
	}
	return nil
}

func (l *Layout) accepted() []Samples {
	out := make([]Samples, len(l.Repeats))
	for i, r := range l.Repeats {
		out[i] = r.Accepted
	}
	return out
}

func (l *Layout) sent() []Samples {
	out := make([]Samples, len(l.Repeats))
	for i, r := range l.Repeats {
		out[i] = r.Sent
	}
	return out
}
