package smtp

import "mailproof/fakes/script"

// Builder is a rule under construction:
//
//	smtp.On(smtp.StageRcpt, smtp.Reply).Code(451).To("bob@*").First(3)
type Builder = script.Builder

// On begins a rule: this action at this stage.
func On(stage Stage, kind script.Kind) Builder { return script.On(stage, kind) }
