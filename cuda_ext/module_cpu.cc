#include "common/module.h"

NB_MODULE(_te_cpu, module) {
  te::DefineModule(module);
  module.def("build", &te::BuildFacts);
}
