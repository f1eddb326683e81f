"""What a stage's file imports of the contract: stages/common/contract.py and inputs.py."""

from stages.common.contract import MAX_HEAD_DIM as MAX_HEAD_DIM
from stages.common.contract import FirstDerivative as FirstDerivative
from stages.common.contract import Stage as Stage
from stages.common.contract import StageUnavailable as StageUnavailable
from stages.common.inputs import check_inputs as check_inputs
from stages.common.inputs import dtype_name as dtype_name
from stages.common.inputs import dual as dual
from stages.common.inputs import input_precision as input_precision
from stages.common.inputs import transformed as transformed
