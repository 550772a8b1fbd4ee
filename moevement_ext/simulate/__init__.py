# SPDX-License-Identifier: Apache-2.0
"""What fault tolerance costs and saves: closed forms and simulations, with numpy alone."""
