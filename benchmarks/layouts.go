package benchmarks

// Names of the layouts.
const (
	layoutIdle     = "idle"
	layoutSplit    = "split"
	layoutBucket   = "bucket"
	layoutOnePool  = "one-pool"
	layoutOneQueue = "one-queue"
)

// bucketRate is the token bucket's of the layout that has one: below what the
// marketing lane reaches alone on two cores, so that it binds.
const bucketRate = "400"

// layoutLabel is a layout's name in a plot.
func layoutLabel(name string) string {
	switch name {
	case layoutBucket:
		return "split, with a token bucket"
	case layoutOnePool:
		return "one pool"
	case layoutOneQueue:
		return "one queue, one pool"
	default:
		return name
	}
}

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
